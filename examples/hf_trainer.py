"""The Hugging Face Trainer, unchanged: the launcher or one argument names the mode.

accelerate launch --mixed_precision bf16-stochastic examples/hf_trainer.py
python examples/hf_trainer.py --optim adamw_bf16_stochastic
python examples/hf_trainer.py --prompt "def main"   # loads what was saved and goes on writing

Any option of TrainingArguments can be given as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from byte_llama import byte_tokenizer, make_llama
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from torch_bf16.tools.compare.corpus import batches, load_corpus


@dataclass
class Options:
    context: int = field(default=64, metadata={"help": "bytes per sequence"})
    width: int = 128
    layers: int = 4
    corpus_bytes: int = 4_000_000
    prompt: str = field(default="", metadata={"help": "write on from here instead of training"})


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's own, with defaults that suit this example."""

    output_dir: str = "hf-trainer"
    max_steps: int = 300
    per_device_train_batch_size: int = 16
    learning_rate: float = 5e-4
    weight_decay: float = 0.1
    logging_steps: float = 50
    save_strategy: str = "no"
    report_to: str | None = "none"
    use_cpu: bool = not torch.cuda.is_available()


def rows(text: torch.Tensor, options: Options, *, n: int, seed: int) -> Dataset:
    windows = batches(text, n=n, batch_size=1, context=options.context, seed=seed)[:, 0]
    return Dataset.from_dict({"input_ids": windows.tolist(), "labels": windows.tolist()})


def train(arguments: TrainingArguments, options: Options) -> float:
    set_seed(arguments.seed)
    corpus = load_corpus(options.corpus_bytes)
    model = make_llama(width=options.width, layers=options.layers, context=options.context + 1)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(corpus.train, options, n=2000, seed=1),
        eval_dataset=rows(corpus.validation, options, n=64, seed=2),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"validation loss {loss:.4f}, saved to {arguments.output_dir}")
    return loss


def write_on(folder: str, prompt: str) -> str:
    """Forty more bytes, by the model as it was saved."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**tokens, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(written[0], skip_special_tokens=True)


def main(arguments: list[str] | None = None) -> None:
    trained, options = HfArgumentParser((Arguments, Options)).parse_args_into_dataclasses(arguments)
    if options.prompt:
        print(write_on(trained.output_dir, options.prompt))
    else:
        train(trained, options)


if __name__ == "__main__":
    main()
