"""What is run over the tasks and the methods: one module for each command."""
