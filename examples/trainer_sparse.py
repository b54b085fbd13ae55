"""Train a block-sparse model on texts with transformers.Trainer and SMET; what is saved is an ordinary model.

python examples/trainer_sparse.py --model FOLDER_OR_NAME --texts FILE.jsonl --output_dir runs/sparse --max_steps 1000
"""

from dataclasses import dataclass

import transformers
from datasets import load_dataset

from pumice.integrations.transformers import ReportOptimizer, optimizer_cls_and_kwargs, prepare_model
from pumice.sparse import densify


@dataclass
class Job:
    model: str
    texts: str
    density: float = 0.4
    interval: int = 100


job, args = transformers.HfArgumentParser((Job, transformers.TrainingArguments)).parse_args_into_dataclasses()
options = {"density": job.density, "block_shape": (1, 16), "interval": job.interval}
tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model, callbacks = prepare_model("smet", transformers.AutoModelForCausalLM.from_pretrained(job.model), args, **options)
texts = load_dataset("json", data_files=job.texts, split="train")
rows = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=512), remove_columns=texts.column_names)

pair = optimizer_cls_and_kwargs("smet", args, **options)
collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = transformers.Trainer(
    model, args, collator, rows, optimizer_cls_and_kwargs=pair, callbacks=[ReportOptimizer(), *callbacks]
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
densify(model)
trainer.save_model()
