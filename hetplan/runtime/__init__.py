"""Training a plan for real with torch.distributed; imports torch, so only commands that need it import this."""
