# SPDX-License-Identifier: Apache-2.0
"""Train the bundled model's tokenizer: byte-level BPE, key words whole, digits in pairs."""

from __future__ import annotations

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvfold.eval import short_ruler
from kvfold.eval.tasks.vocabulary import ADJECTIVES, NOUNS
from training.corpus import REPEAT

VOCABULARY = 2048
SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# Pairs of digits and words with their leading space, single capitals outside words, the rest.
PIECES = r" ?[0-9]{1,2}| ?[A-Z]?[a-z]+| ?[A-Z]| ?[^\sA-Za-z0-9]+|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(text: str) -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY` tokens from task wording and, where there is any, `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_wording(text), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def _wording(text: str) -> list[str]:
    rng = random.Random(0)
    lines = [REPEAT] * 2000
    lines += [f" {rng.randrange(100):02d}{rng.randrange(100):02d}" for _ in range(200_000)]
    lines += [f" {word}" for word in ADJECTIVES] * 2000
    lines += [f"-{word} {word}" for word in NOUNS] * 2000
    for task in short_ruler.TASKS:
        for _ in range(300):
            sample = short_ruler.generate(task, 400, lambda line: len(line.split()), rng)
            lines += [sample.document, *(q.text + q.prefix for q in sample.questions)]
    return lines + text[:3_000_000].splitlines()
