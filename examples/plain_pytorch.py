"""A training loop of plain PyTorch with block-sparse layers, SMET and a checkpoint that can be resumed.

python examples/plain_pytorch.py FOLDER [STEPS]
"""

import sys
from pathlib import Path

import torch
from torch import nn

from pumice.optim import SMET
from pumice.sparse import Topology, sparsify

folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32), nn.Linear(32, 64))
sparsify(model, density=0.4, block_shape=(1, 16), keep="random", rescale=True)
optimizer = SMET.from_model(model, lr=1e-2)
topology = Topology(model, interval=2, total_steps=100)
parts, start = {"model": model, "optimizer": optimizer, "topology": topology}, 0
if (path := folder / "checkpoint.pt").is_file():
    saved = torch.load(path)
    start = saved.pop("step")
    for name, part in parts.items():
        part.load_state_dict(saved[name])

for step in range(start, steps):
    tokens = torch.randint(64, (32,), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 64)
    loss.backward()
    optimizer.step()
    topology.step(optimizer)
    optimizer.zero_grad()
print(f"loss {loss.item():.4f} after {steps} steps, {topology.updates} topology updates")
folder.mkdir(parents=True, exist_ok=True)
torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": steps}, folder / "checkpoint.pt")
