"""A LightningModule that SinkGD trains, with Lightning's checkpoints.

python examples/lightning_module.py [FOLDER [STEPS [CHECKPOINT]]]
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from pumice.optim import SinkGD


class Successor(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(tokens), (tokens + 1) % 64)

    def configure_optimizers(self) -> SinkGD:
        return SinkGD.from_model(self, lr=1e-2)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(torch.arange(640) % 64, batch_size=32)


folder, steps, checkpoint = (*sys.argv[1:], *("runs/lightning", 100, None)[len(sys.argv) - 1 :])
lightning.seed_everything(0)
module = Successor()
checkpoints = ModelCheckpoint(folder, save_last=True)  # at the end of each epoch
trainer = lightning.Trainer(max_steps=int(steps), logger=False, enable_progress_bar=False, callbacks=[checkpoints])
trainer.fit(module, ckpt_path=checkpoint)
