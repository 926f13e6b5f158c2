"""Counts the padding of all steps under several ways to batch their rows; no GPU, no model.

    python scripts/count_padding.py --data data/hh-rlhf/helpful-base.test.jsonl.gz \
        --tokenizer models/smollm2

| row | batches of |
|---|---|
| one length | any rows, as long as the longest row of all: steps 1 and 2 without packing |
| own length | any rows, as long as the longest of the batch, in multiples of 64 |
| 4 buckets | rows of one of four length classes of equal counts; the batches that mix two are few |
| packed | sequences of several rows: --sft.packing, --reward.packing |

The last column is how many times the real tokens of "4 buckets" a step sees for the same number of
tokens that go through the model: the factor in tokens/s where time goes with them.

Step 3 answers the prompts of step 1; what the data answer, cut at half of `--max-seq-len`, stands
for the answers of a policy. Rows are as wide as the bucket of their prompts and the longest answer,
or packed for `--devices`, to which they are dealt out by their lengths: --ppo.packing.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from transformers import AutoTokenizer

from rlhf_jax.data.batches import bucket_of, prompt_buckets, round_up
from rlhf_jax.data.packing import Packing
from rlhf_jax.data.placing import Groups, balance, place
from rlhf_jax.data.sources import load_source
from rlhf_jax.data.tokenize import PromptRow, SftRow, tokenize_pairs, tokenize_sft
from rlhf_jax.stages.prompts import PAD_MULTIPLE as PROMPT_MULTIPLE
from rlhf_jax.stages.rows import PAD_MULTIPLE

BUCKET_MULTIPLE = 64
NUM_BUCKETS = 4


def of_batches(lengths: np.ndarray, order: np.ndarray, batch_size: int) -> int:
    """Tokens of batches in this order, each as long as its longest row."""
    batches = [lengths[order[n : n + batch_size]] for n in range(0, len(order), batch_size)]
    return sum(len(batch) * round_up(int(batch.max()), BUCKET_MULTIPLE) for batch in batches)


def bucketed(lengths: np.ndarray, order: np.ndarray, batch_size: int) -> int:
    """Tokens of batches whose rows share a bucket, as long as the bucket."""
    shares = np.arange(1, NUM_BUCKETS + 1) / NUM_BUCKETS
    bounds = np.quantile(lengths, shares, method="higher")
    buckets = np.array([round_up(int(bound), BUCKET_MULTIPLE) for bound in bounds])
    of_rows = buckets[np.searchsorted(buckets, lengths)]
    grouped = order[np.argsort(of_rows[order], kind="stable")]
    return of_batches(of_rows, grouped, batch_size)


def table(
    name: str, widths: Sequence[int], items: Sequence[int], rows: int, batch_size: int
) -> None:
    """A line for each way to batch items of `rows` rows.

    `widths` is the longest row of each, `items` the tokens of all its rows.
    """
    sizes, order = np.array(widths), np.random.default_rng(0).permutation(len(widths))
    packing = Packing.of(items, PAD_MULTIPLE, batch_size=batch_size, multiple=1)
    per_batch = packing.sequences_per_batch(batch_size, 1)
    batches = -(-packing.num_sequences // per_batch)
    ways = {
        "one length": rows * len(sizes) * round_up(int(sizes.max()), PAD_MULTIPLE),
        "own length": rows * of_batches(sizes, order, batch_size),
        f"{NUM_BUCKETS} buckets": rows * bucketed(sizes, order, batch_size),
        "packed": batches * per_batch * packing.length,
    }
    print(
        f"{len(items)} {name}, mean {np.mean(items):.0f} tokens, longest {max(items)}; batches of "
        f"{batch_size}, packed {per_batch} x {packing.length}"
    )
    print_ways(ways, sum(items))


def ppo_table(
    rows: Sequence[SftRow], longest: int, batch_size: int, devices: Sequence[int]
) -> None:
    """The lines of step 3, of whole batches."""
    asked = [row for row in rows if row.prompt_length <= longest]
    prompts = [PromptRow(row.tokens[: row.prompt_length], n, "") for n, row in enumerate(asked)]
    buckets = prompt_buckets(prompts, max_buckets=NUM_BUCKETS, pad_multiple=PROMPT_MULTIPLE)
    lengths = np.array([len(row.tokens) for row in prompts])
    answers = np.array([min(len(row.tokens) - row.prompt_length, longest) for row in asked])
    wide = np.array([bucket_of(length, buckets) for length in lengths])
    order = np.random.default_rng(0).permutation(len(asked))
    order = order[np.argsort(wide[order], kind="stable")]
    count = len(order) // batch_size
    batches = order[: count * batch_size].reshape(count, batch_size)
    real = int((lengths + answers)[batches].sum())
    unpacked = [(int(wide[batch].max()) + longest) for batch in batches]
    print(
        f"{batches.size} prompts, mean {lengths.mean():.0f} tokens, buckets {buckets}; answers, "
        f"mean {answers.mean():.0f}, at most {longest}; batches of {batch_size}"
    )
    ways = {f"{NUM_BUCKETS} buckets": batch_size * sum(unpacked)}
    for number in devices:
        groups, total = Groups(number), 0
        for batch, width in zip(batches, unpacked, strict=True):
            sizes = (lengths + answers)[batch]
            sizes = sizes[balance(sizes, groups)]
            places = place(sizes, groups, width=buckets[-1] + longest, unpacked=width)
            total += batch_size * width if places is None else places.num_tokens * number
        ways[f"packed, {number}"] = total
    print_ways(ways, real)


def print_ways(ways: dict[str, int], real: int) -> None:
    """Tokens that go through the model, of which so many are real."""
    for way, tokens in ways.items():
        factor = ways[f"{NUM_BUCKETS} buckets"] / tokens
        padding = 1 - real / tokens
        print(f"{way:12s} {tokens:10d} tokens, {padding:6.1%} padding {factor:6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="as --data.data-path")
    parser.add_argument("--tokenizer", required=True, help="a directory, or a name on the Hub")
    parser.add_argument("--eos-token", help="where the tokenizer's files name none")
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], help="of step 3")
    args = parser.parse_args()
    named = {} if args.eos_token is None else {"eos_token": args.eos_token}
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, **named)
    source = load_source(args.data, split="train", stage="reward")
    if source is None:
        raise SystemExit(f"{args.data} has no split train")
    rows, report = tokenize_sft(
        source.records, tokenizer, max_length=args.max_seq_len, overlong="drop"
    )
    print(f"step 1: {report}")
    lengths = [len(row.tokens) for row in rows]
    table("rows", lengths, lengths, 1, args.batch_size)
    pairs, report = tokenize_pairs(
        source.records, tokenizer, max_length=args.max_seq_len, overlong="drop"
    )
    print(f"step 2: {report}")
    widths = [max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    both = [len(pair.chosen) + len(pair.rejected) for pair in pairs]
    table("pairs", widths, both, 2, args.batch_size)
    print("step 3:")
    ppo_table(rows, args.max_seq_len // 2, args.batch_size, args.devices)


if __name__ == "__main__":
    main()
