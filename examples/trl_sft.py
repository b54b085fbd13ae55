"""Fine-tune all weights on conversations with TRL and SinkGD; any field of SFTConfig follows.

python examples/trl_sft.py --model FOLDER_OR_NAME --conversations FILE.jsonl --output_dir runs/sft --packing true
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from pumice.integrations.transformers import ReportOptimizer, optimizer_cls_and_kwargs


@dataclass
class Job:
    model: str
    conversations: str  # one {"messages": [{"role": ..., "content": ...}, ...]} a line


job, args = HfArgumentParser((Job, SFTConfig)).parse_args_into_dataclasses()
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(job.model),
    args,
    train_dataset=load_dataset("json", data_files=job.conversations, split="train"),
    processing_class=AutoTokenizer.from_pretrained(job.model),
    optimizer_cls_and_kwargs=optimizer_cls_and_kwargs("sinkgd", args, lr_scale="match_rms_adamw"),
    callbacks=[ReportOptimizer()],
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
