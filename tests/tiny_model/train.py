"""Train the tiny Llama model that demonstrations and tests use, from stories that are generated on the way.

    python tests/tiny_model/train.py --steps 2600 --threads 1 --output tests/tiny_model/model

writes a checkpoint directory as transformers does: a byte-fallback BPE tokenizer in the manner of SentencePiece,
and a model that has seen no story twice. `--steps` gives the same model again on the same machine; `--minutes`
fits the schedule to the time there is instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from stories import tell_stories
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
UNK, BOS, EOS = range(3)
VOCAB_SIZE = 1024
CONTEXT = 512
BATCH = 4
PEAK_LEARNING_RATE = 3e-3
WARMUP = 0.05  # the share of the training during which the learning rate rises
TOKENIZER_SEED, TRAINING_SEED, HELD_OUT_SEED = 1, 2, 3
TOKENIZER_STORIES = 4000
HELD_OUT_STORIES = 200
# The model knows no roles: the messages of a chat are the beginning of a story.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ ' ' if not loop.last }}{% endfor %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A BPE tokenizer whose vocabulary starts with the special tokens and the 256 bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    learner = Tokenizer(models.BPE())
    # Line breaks stay out of the alphabet and become bytes. No merge crosses a space or a punctuation mark, so
    # that the tokenizer made of the merges needs no splitting of its own.
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "removed"),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            pre_tokenizers.Punctuation(),
        ]
    )
    room = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(byte_tokens)
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=room, show_progress=False))
    learned = learner.get_vocab()
    tokens = [*SPECIAL_TOKENS, *byte_tokens, *sorted(learned, key=learned.__getitem__)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def make_config() -> LlamaConfig:
    """About 0.7 million parameters; every size is a multiple of 16, the query heads share key/value heads."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.06,  # suits so narrow a model better than the usual 0.02
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
    )


def make_batches(tokenizer: Tokenizer, seed: int) -> Iterator[torch.Tensor]:
    """Windows of stories, [BATCH, CONTEXT] int64; each starts with a story and cuts its last one short."""
    stories = tell_stories(seed)
    while True:
        windows = []
        for _ in range(BATCH):
            window: list[int] = []
            while len(window) < CONTEXT:
                window += [*tokenizer.encode(next(stories).text).ids, EOS]
            windows.append(window[:CONTEXT])
        yield torch.tensor(windows)


def learning_rate(progress: float) -> float:
    """A linear rise, then half a cosine down to nothing; progress runs from 0 to 1."""
    if progress < WARMUP:
        return PEAK_LEARNING_RATE * progress / WARMUP
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))


def train_model(tokenizer: Tokenizer, steps: int | None, minutes: float) -> LlamaForCausalLM:
    """The model after so many steps or, without a number of steps, after so many minutes."""
    torch.manual_seed(TRAINING_SEED)
    model = LlamaForCausalLM(make_config())
    optimizer = make_optimizer(model)
    start = time.monotonic()
    for step, batch in enumerate(make_batches(tokenizer, TRAINING_SEED)):
        elapsed = (time.monotonic() - start) / 60
        progress = step / steps if steps is not None else elapsed / minutes
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {elapsed:.1f} minutes", flush=True)
    return model


@torch.inference_mode()
def measure_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, count: int) -> tuple[float, float]:
    """Nats per token that the model needs for new stories, and those that the generator put into them."""
    needed = drawn = 0.0
    tokens = 0
    for story in itertools.islice(tell_stories(seed), count):
        ids = torch.tensor([[*tokenizer.encode(story.text).ids, EOS]])
        predicted = ids.shape[1] - 1
        needed += model(input_ids=ids, labels=ids).loss.item() * predicted
        drawn += story.nats
        tokens += predicted
    return needed / tokens, drawn / tokens


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the checkpoint directory."""
    model.save_pretrained(directory)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers gives it no types
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(directory)


def main(argv: list[str] | None = None) -> None:
    """Train, measure, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--steps", type=int, help="train for so many steps instead of --minutes")
    parser.add_argument("--minutes", type=float, default=8.0, help="time to train (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads to compute with (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    texts = (story.text for story in itertools.islice(tell_stories(TOKENIZER_SEED), TOKENIZER_STORIES))
    tokenizer = train_tokenizer(texts)
    model = train_model(tokenizer, args.steps, args.minutes)
    model.train(False)
    loss, entropy = measure_loss(model, tokenizer, HELD_OUT_SEED, HELD_OUT_STORIES)
    save(model, tokenizer, args.output)
    print(f"{model.num_parameters():,} parameters, held-out loss {loss:.4f} nats per token", end=" ")
    print(f"(perplexity {math.exp(loss):.4f}; the generator's own entropy is {entropy:.4f})")


if __name__ == "__main__":
    main()
