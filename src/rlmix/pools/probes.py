"""What an engine must show besides canary logprobs before it serves, and again after an update.

Pure checks of recorded answers. Each would let a silent error into every sample: logprobs at
another temperature than was sampled at, a kept set that was not sampled from, the version of other
weights, weights that a second load changes, and a version number on weights that did not arrive.
"""

# V vocabulary, K ids of a head

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlmix.core.candidates import Candidates
from rlmix.engine.protocol import GenerateRequest, Generation, SamplingParams
from rlmix.pools.spec import AdmissionRefused, CanaryOutput, WeightProof

PROBE_TEMPERATURE = 0.6
"""Far enough from 1 that logprobs at the wrong one cannot pass for rounding."""
PROBE_TOP_P, PROBE_TOP_K = 0.9, 64
"""SGLang records kept sets for a finite top_k only."""
PROBE_HEAD = 8
PROBE_TOKENS = 6

SLOPE_TOLERANCE = 0.1
"""Of the ratio between logprob differences at two temperatures; 1/0.6 is 1.67, a raw logprob gives
1. A decode step's BF16 rounding moves it by a few percent."""
FLAT_NATS = 0.5
"""A head whose ids differ by less is too flat to tell a slope from rounding."""
SAME_NATS = 0.02
"""Between a kept set's logprobs, lifted by its mass, and the head of the same answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingProbe:
    """Answers to the two requests of `probe_requests`."""

    at_one: Generation
    at_temperature: Generation


def probe_requests(
    prompt_ids: Sequence[int], *, name: str, number: int, num_tokens: int = PROBE_TOKENS
) -> tuple[GenerateRequest, GenerateRequest]:
    """One token at temperature 1 with its head, and a few at another with kept sets and heads.

    Args:
        number: makes the ids unique; an engine may run only one request of an id.
    """

    def request(kind: str, record: str, **sampling: float | int) -> GenerateRequest:
        return GenerateRequest(
            session_id=f"probe-{name}",
            request_id=f"probe-{kind}-{name}-{number}",
            input_ids=tuple(prompt_ids),
            sampling=SamplingParams(seed=number, ignore_eos=True, **sampling),  # type: ignore[arg-type]
            record=record,
            head_k=PROBE_HEAD,
            # A prefix that older weights left behind (pause mode in_place) would be probed too.
            cache_salt=f"probe-{number}",
        )

    return (
        request("one", "head", temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1),
        request(
            "cut",
            "support",
            temperature=PROBE_TEMPERATURE,
            top_p=PROBE_TOP_P,
            top_k=PROBE_TOP_K,
            max_new_tokens=num_tokens,
        ),
    )


def check_sampling(probe: SamplingProbe, *, version: int, name: str) -> None:
    """Refuse an engine whose sampling does not do what its answers say.

    That each kept set holds its sampled token and sums to 1 was checked when the answer was read.

    Raises:
        AdmissionRefused: wrong version, logprobs not after temperature, or kept sets that are not
            cut out of the distribution that the head shows.
    """
    for generation in (probe.at_one, probe.at_temperature):
        told = [span.version for span in generation.version_spans]
        if set(told) != {version}:
            raise AdmissionRefused(
                f"pools: {name}: version probe: a turn was sampled by version "
                f"{', '.join(map(str, told))}, the replica should serve {version}"
            )
    plain, tempered = probe.at_one.kept, probe.at_temperature.head
    if plain is not None and tempered is not None:
        _check_temperature(plain, tempered, name=name)
    if probe.at_temperature.kept is not None and tempered is not None:
        _check_mask(probe.at_temperature.kept, tempered, name=name)


def temperature_slope(plain: Candidates, tempered: Candidates) -> float | None:
    """How much farther apart logprobs are after temperature, at the first token of both heads.

    Log-softmax of logits / T keeps differences of logits, divided by T, so the slope is 1/T
    whatever the weights are. Least squares over the ids that both heads hold.

    Returns:
        None when they share fewer than two ids, or are too flat to tell.
    """
    first = dict(_entries(plain, 0))
    second = dict(_entries(tempered, 0))
    shared = [token for token in first if token in second]
    if len(shared) < 2:
        return None
    before_K = np.array([first[token] for token in shared])
    after_K = np.array([second[token] for token in shared])
    before_K = before_K - before_K.mean()
    after_K = after_K - after_K.mean()
    if np.abs(before_K).max() < FLAT_NATS:
        return None
    return float(before_K @ after_K / (before_K @ before_K))


def _check_temperature(plain: Candidates, tempered: Candidates, *, name: str) -> None:
    slope = temperature_slope(plain, tempered)
    wanted = 1.0 / PROBE_TEMPERATURE
    if slope is not None and not abs(slope / wanted - 1.0) <= SLOPE_TOLERANCE:
        raise AdmissionRefused(
            f"pools: {name}: logprob probe: at temperature {PROBE_TEMPERATURE:g} logprobs lie "
            f"{slope:.3g} times as far apart as at 1, expected {wanted:.3g}: they are not those "
            "after temperature, which the trainer corrects by"
        )


def _check_mask(kept: Candidates, head: Candidates, *, name: str) -> None:
    for position in range(len(kept)):
        kept_ids = dict(_entries(kept, position))
        lifts = [
            value - whole
            for token, whole in _entries(head, position)
            if (value := kept_ids.get(token)) is not None
        ]
        # Renormalising on a set lifts every member by minus the log of the set's mass.
        if lifts and (max(lifts) - min(lifts) > SAME_NATS or min(lifts) < -SAME_NATS):
            raise AdmissionRefused(
                f"pools: {name}: mask probe: at position {position} kept logprobs lie between "
                f"{min(lifts):.4g} and {max(lifts):.4g} nats above those of the whole vocabulary; "
                "a set that was sampled from lifts all by one number"
            )


def _entries(candidates: Candidates, position: int) -> list[tuple[int, float]]:
    start, end = candidates.offsets[position], candidates.offsets[position + 1]
    ids, logprobs = candidates.ids[start:end], candidates.logprobs[start:end]
    return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


def check_identity(
    before: Sequence[CanaryOutput],
    after: Sequence[CanaryOutput],
    *,
    checksums: tuple[str, str],
    name: str,
    tolerance_nats: float,
) -> float:
    """Refuse an engine that answers otherwise after the same weights were loaded again.

    Args:
        checksums: of the engine's weights before and after.
    Returns:
        The largest difference of a logprob, nats; 0 where kernels repeat their bits.
    Raises:
        AdmissionRefused: another checksum, other logprobs, or other tokens so early that no
            near-tie explains them.
    """
    if checksums[0] != checksums[1]:
        raise AdmissionRefused(
            f"pools: {name}: identity probe: the same weights, loaded again, changed the checksum "
            f"from {checksums[0][:16]} to {checksums[1][:16]}"
        )
    largest = 0.0
    for index, (first, second) in enumerate(zip(before, after, strict=True)):
        common = 0
        for one, other in zip(first.output_ids, second.output_ids, strict=False):
            if one != other:
                break
            common += 1
        gaps = np.abs(
            np.array(first.sampler_logprobs[:common]) - np.array(second.sampler_logprobs[:common])
        )
        largest = float(np.max([largest, *gaps]))  # NaN stays.
        # Two tokens that are equally likely may change places; the first ones seldom do.
        if common <= len(first.output_ids) // 2 or not largest <= tolerance_nats:
            raise AdmissionRefused(
                f"pools: {name}: identity probe: after the same weights were loaded again, canary "
                f"{index} keeps {common} of {len(first.output_ids)} greedy tokens and logprobs "
                f"within {largest:.4g} nats, allowed {tolerance_nats:g}"
            )
    return largest


@dataclass(slots=True)
class WeightLedger:
    """Checksums that engines read back, so that equal files are equal weights, and only they.

    An engine computes its checksum over its own layout, so nothing outside can say what it should
    be; but replicas of one pool that hold one content must agree, however it came to them, and
    another content must give another checksum. (A step that changed nothing publishes the same
    content under a new version.)
    """

    seen: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """(pool, content) -> checksum, and who reported it first as what."""

    def note(self, proof: WeightProof, *, pool: str, name: str, is_fresh: bool = False) -> None:
        """Take what a replica read back; one that cannot read back is not checked.

        Args:
            is_fresh: the engine has just been started on the files: its word counts more than that
                of engines that were updated.
        Raises:
            AdmissionRefused: another replica of the pool has other weights of the same content, or
                other content has these weights.
        """
        if not proof.checksum:
            return
        says = f"{name} as version {proof.version}"
        known = self.seen.get((pool, proof.content))
        if known is not None and known[0] != proof.checksum and not is_fresh:
            raise AdmissionRefused(
                f"pools: {says} has the checksum {proof.checksum[:16]}, {known[1]} has "
                f"{known[0][:16]} of the same files: part of an update was lost"
            )
        for (other_pool, content), (checksum, other) in self.seen.items():
            if other_pool == pool and checksum == proof.checksum and content != proof.content:
                raise AdmissionRefused(
                    f"pools: {says} has the checksum {checksum[:16]}, which {other} had of other "
                    "files: the version number changed and the weights did not"
                )
        if known is None or known[0] != proof.checksum:
            self.seen[pool, proof.content] = (proof.checksum, says)
