"""Experimental transport: KV over a two-rank group of torch.distributed, in helper processes.

Each end of a group is a helper process; this package does not import torch. Workers offer it only
if ``WorkerSettings.transports`` names it. It was tested with gloo; NCCL was never run.
"""
