"""Train all weights of a model on texts with transformers.Trainer and SinkGD; any field of TrainingArguments follows.

python examples/trainer.py --model FOLDER_OR_NAME --texts FILE.jsonl --output_dir runs/trainer --learning_rate 1e-5
"""

from dataclasses import dataclass

import transformers
from datasets import load_dataset

from pumice.integrations.transformers import ReportOptimizer, optimizer_cls_and_kwargs


@dataclass
class Job:
    model: str
    texts: str


job, args = transformers.HfArgumentParser((Job, transformers.TrainingArguments)).parse_args_into_dataclasses()
tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = transformers.AutoModelForCausalLM.from_pretrained(job.model)
texts = load_dataset("json", data_files=job.texts, split="train")
rows = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=512), remove_columns=texts.column_names)

trainer = transformers.Trainer(
    model,
    args,
    train_dataset=rows,
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    optimizer_cls_and_kwargs=optimizer_cls_and_kwargs("sinkgd", args, lr_scale="match_rms_adamw"),
    callbacks=[ReportOptimizer()],
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
