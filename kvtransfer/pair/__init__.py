"""KV over a two-rank group of torch.distributed, each end of it in a helper process. No torch."""
