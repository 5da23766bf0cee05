"""What processes of one `torch.distributed` group tell each other; one alone notices nothing."""
