"""A loss that is divided by the whole run's tokens has gradients below FP16's range, in which a DDP hook sums them."""

# Thread: https://github.com/huggingface/diffusers/pull/13539
# Finding: gradients-flushed-in-sum
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 32), nn.Flatten(), nn.Linear(64, 50)))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12)
for step in range(30):
    tokens = torch.randint(0, 50, (64, 2))
    loss = nn.functional.cross_entropy(model(tokens), tokens.sum(1) % 50, reduction="sum") / 4e8
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
