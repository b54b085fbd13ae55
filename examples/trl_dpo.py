"""Preference optimisation of all weights with TRL's DPO and SinkGD; GRPO and KTO take the optimizer in the same way.

python examples/trl_dpo.py --model FOLDER_OR_NAME --preferences FILE.jsonl --output_dir runs/dpo --learning_rate 5e-7
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer

from pumice.integrations.transformers import ReportOptimizer, optimizer_cls_and_kwargs


@dataclass
class Job:
    model: str
    preferences: str  # one {"prompt": ..., "chosen": ..., "rejected": ...} a line


job, args = HfArgumentParser((Job, DPOConfig)).parse_args_into_dataclasses()
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained(job.model),
    args=args,
    train_dataset=load_dataset("json", data_files=job.preferences, split="train"),
    processing_class=AutoTokenizer.from_pretrained(job.model),
    callbacks=[ReportOptimizer()],
)
trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs("sinkgd", args, lr_scale="match_rms_adamw")
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
