"""DeepSpeed-Chat's rules in float64 NumPy loops, one row and one position at a time.

Written from a description of `dschat/utils/model/reward_model.py` and `dschat/rlhf/ppo_trainer.py`.
Rows are as there: prompts left-padded to P columns, answers right-padded, and a token is real where
its id is not the pad id, which is also the stop token's. `logprobs[i, t]` is that of token t + 1.
"""

import math

import numpy as np

PAD = 1
KL_COEF = 0.1
SCORE_CLIP = 5.0
POLICY_CLIP = 0.2
VALUE_CLIP = 0.2
GAMMA = 1.0
LAM = 0.95


def answer_end(ids: np.ndarray, num_padding_at_beginning: int) -> int:
    """Where the pad stands that comes after the leading ones; the row's size without one."""
    pads_to_skip = num_padding_at_beginning
    for position, token in enumerate(ids):
        if token == PAD:
            if pads_to_skip == 0:
                return position
            pads_to_skip -= 1
    return len(ids)


def pair_losses(
    chosen: np.ndarray,
    rejected: np.ndarray,
    chosen_scores: np.ndarray,
    rejected_scores: np.ndarray,
    num_padding_at_beginning: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss of each pair, and the two scores that are reported for it."""
    losses, chosen_ends, rejected_ends = [], [], []
    for c_ids, r_ids, c, r in zip(chosen, rejected, chosen_scores, rejected_scores, strict=True):
        c_end = answer_end(c_ids, num_padding_at_beginning)
        if list(c_ids) == list(r_ids):
            r_end, start, stop = c_end, len(c_ids) - 1, len(c_ids)
        else:
            r_end = answer_end(r_ids, num_padding_at_beginning)
            start = next(t for t in range(len(c_ids)) if c_ids[t] != r_ids[t])
            stop = max(c_end, r_end)
        margins = [float(c[t]) - float(r[t]) for t in range(start, stop)]
        losses.append(sum(math.log1p(math.exp(-m)) for m in margins) / len(margins))
        chosen_ends.append(c[c_end - 1])
        rejected_ends.append(r[r_end - 1])
    return np.array(losses), np.array(chosen_ends), np.array(rejected_ends)


def ppo_targets(
    ids: np.ndarray,
    num_prompt_columns: int,
    logprobs: np.ndarray,
    ref_logprobs: np.ndarray,
    scores: np.ndarray,
    values: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, advantages and returns of the answer's slots: each [B, A]."""
    first = num_prompt_columns - 1
    num_slots = logprobs.shape[1] - first
    rewards, advantages, returns = np.zeros((3, len(ids), num_slots))
    for i in range(len(ids)):
        real_answer_tokens = sum(1 for token in ids[i, num_prompt_columns:] if token != PAD)
        used = min(real_answer_tokens + 1, num_slots)
        for s in range(used):
            rewards[i, s] = -KL_COEF * (logprobs[i, first + s] - ref_logprobs[i, first + s])
        rewards[i, used - 1] += min(max(scores[i], -SCORE_CLIP), SCORE_CLIP)
        row_values = [values[i, first + s] if s < used else 0.0 for s in range(num_slots)] + [0.0]
        following = 0.0
        for s in reversed(range(num_slots)):
            delta = rewards[i, s] + GAMMA * row_values[s + 1] - row_values[s]
            following = delta + GAMMA * LAM * following
            advantages[i, s] = following
            returns[i, s] = following + row_values[s]
    return rewards, advantages, returns


def ppo_losses(
    ids: np.ndarray,
    num_prompt_columns: int,
    new_logprobs: np.ndarray,
    logprobs: np.ndarray,
    new_values: np.ndarray,
    values: np.ndarray,
    advantages: np.ndarray,
    returns: np.ndarray,
) -> tuple[float, float]:
    """Policy and value loss: means over the answer tokens that are not the pad."""
    first = num_prompt_columns - 1
    policy_terms, value_terms = [], []
    for i in range(len(ids)):
        for s in range(advantages.shape[1]):
            if ids[i, num_prompt_columns + s] == PAD:
                continue
            t = first + s
            ratio = math.exp(new_logprobs[i, t] - logprobs[i, t])
            held_ratio = min(max(ratio, 1 - POLICY_CLIP), 1 + POLICY_CLIP)
            policy_terms.append(max(-advantages[i, s] * ratio, -advantages[i, s] * held_ratio))
            low, high = values[i, t] - VALUE_CLIP, values[i, t] + VALUE_CLIP
            held_value = min(max(new_values[i, t], low), high)
            errors = (new_values[i, t] - returns[i, s], held_value - returns[i, s])
            value_terms.append(max(error**2 for error in errors))
    return float(np.mean(policy_terms)), 0.5 * float(np.mean(value_terms))
