"""SinkGD on a model that FSDP2 has sharded, with a checkpoint of torch.distributed.checkpoint that can be resumed.

torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER [STEPS]
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from pumice.optim import SinkGD

folder, steps = Path(sys.argv[1]) / "checkpoint", int(sys.argv[2]) if len(sys.argv) > 2 else 100
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32), nn.Linear(32, 64))
fully_shard(model)
optimizer = SinkGD.from_model(model, lr=1e-2)
start = torch.zeros(1, dtype=torch.int64)
if folder.is_dir():
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "state": state, "step": start}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

for step in range(int(start), steps):
    tokens = torch.arange(32, device=model[0].weight.device) * (step + dist.get_rank()) % 64
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 64)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights, state = get_state_dict(model, optimizer)
dcp.save({"weights": weights, "state": state, "step": torch.tensor([steps])}, checkpoint_id=folder)
dist.barrier()
dist.destroy_process_group()
