"""The light part of `laplace-lora`: its arguments and help.

It is a package of its own since `import laplace_lora_ext` registers with laplace-torch,
and so imports torch and laplace: help should not wait for them.
"""
