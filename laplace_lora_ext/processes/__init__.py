"""What the processes of a `torch.distributed` group tell each other."""
