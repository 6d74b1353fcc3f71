"""What the probes refuse, with numbers worked by hand."""

import math

import numpy as np
import pytest

from rlmix.core.candidates import Candidates
from rlmix.core.trajectory import VersionSpan
from rlmix.engine.protocol import Generation
from rlmix.pools.probes import (
    PROBE_TEMPERATURE,
    SamplingProbe,
    WeightLedger,
    check_identity,
    check_sampling,
    probe_requests,
    temperature_slope,
)
from rlmix.pools.spec import AdmissionRefused, CanaryOutput, WeightProof

LOGITS = np.array([2.0, 1.0, 0.0, -1.0])


def log_softmax(logits, temperature):
    scaled = logits / temperature
    return scaled - np.log(np.exp(scaled).sum())


def generation(*, version=3, kept=None, head=None):
    return Generation(
        output_ids=(0,),
        sampler_logprobs=(-0.1,),
        kept=kept,
        kept_exact=True,
        version_spans=(VersionSpan(version=version, start=0, end=1),),
        finish_reason="length",
        cached_tokens=0,
        pool="",
        replica="",
        numerics_key="",
        rehomed=0,
        head=head,
    )


def head_at(temperature, ids=(0, 1, 2, 3)):
    return Candidates.of([ids], [log_softmax(LOGITS, temperature)[list(ids)]])


def kept_of(ids, temperature=PROBE_TEMPERATURE):
    chosen = log_softmax(LOGITS, temperature)[list(ids)]
    return Candidates.of([ids], [chosen - np.log(np.exp(chosen).sum())])


def probe(*, plain=None, head=None, kept=None, version=3):
    return SamplingProbe(
        at_one=generation(kept=plain or head_at(1.0)),
        at_temperature=generation(
            version=version,
            kept=kept or kept_of((0, 1)),
            head=head or head_at(PROBE_TEMPERATURE),
        ),
    )


def check(**changes):
    check_sampling(probe(**changes), version=3, name="h100-0")


def test_logprobs_lie_one_over_the_temperature_times_as_far_apart():
    assert temperature_slope(head_at(1.0), head_at(0.5)) == pytest.approx(2.0)
    assert temperature_slope(head_at(1.0), head_at(0.5, (3, 0))) == pytest.approx(2.0)
    assert temperature_slope(head_at(1.0), head_at(1.0)) == pytest.approx(1.0)
    # One shared id has no difference, and equally likely ids have none to speak of.
    assert temperature_slope(head_at(1.0, (0,)), head_at(0.5, (0, 1))) is None
    flat = Candidates.of([(0, 1)], [(-0.7, -0.69)])
    assert temperature_slope(flat, flat) is None


def test_a_sound_answer_passes_and_logprobs_before_temperature_do_not():
    check()
    with pytest.raises(AdmissionRefused, match=r"logprob probe: .* 1 times .* expected 1\.67"):
        check(head=head_at(1.0), kept=kept_of((0, 1), 1.0))


def test_a_kept_set_with_other_weights_than_the_distribution_is_refused():
    # 0.5 and 0.5 instead of 0.84 and 0.16.
    with pytest.raises(AdmissionRefused, match="mask probe: at position 0"):
        check(kept=Candidates.of([(0, 1)], [(math.log(0.5), math.log(0.5))]))


def test_a_turn_of_another_version_is_refused():
    with pytest.raises(AdmissionRefused, match=r"version probe: .* by version 2, .* serve 3"):
        check(version=2)


def canary(ids, logprobs):
    return CanaryOutput(prompt_ids=(1,), output_ids=ids, sampler_logprobs=logprobs)


def identity(after, *, checksums=("a", "a")):
    before = [canary((5, 6, 7, 8), (-0.1, -0.2, -0.3, -0.4))]
    return check_identity(before, [after], checksums=checksums, name="r", tolerance_nats=0.05)


def test_the_same_weights_loaded_again_must_answer_alike():
    assert identity(canary((5, 6, 7, 8), (-0.1, -0.2, -0.3, -0.4))) == 0.0
    # The last token is another after a near-tie; what came before differs by 0.01.
    late = canary((5, 6, 7, 9), (-0.11, -0.2, -0.3, -2.0))
    assert identity(late) == pytest.approx(0.01)
    with pytest.raises(AdmissionRefused, match=r"keeps 1 of 4 greedy tokens"):
        identity(canary((5, 9, 7, 8), (-0.1, -0.2, -0.3, -0.4)))
    with pytest.raises(AdmissionRefused, match=r"within 0\.1 nats, allowed 0\.05"):
        identity(canary((5, 6, 7, 8), (-0.2, -0.2, -0.3, -0.4)))
    with pytest.raises(AdmissionRefused, match="changed the checksum from a to b"):
        identity(canary((5, 6, 7, 8), (-0.1, -0.2, -0.3, -0.4)), checksums=("a", "b"))
    with pytest.raises(AdmissionRefused, match="identity probe"):
        identity(canary((5, 6, 7, 8), (math.nan,) * 4))


def proof(version, content, checksum):
    return WeightProof(version=version, content=content, checksum=checksum)


def test_equal_files_are_equal_weights_in_a_pool_and_other_files_other_weights():
    ledger = WeightLedger()
    ledger.note(proof(0, "f0", "c0"), pool="a", name="a-0")
    ledger.note(proof(0, "f0", "c0"), pool="a", name="a-1")
    # Another pool has another layout, and a step that changed nothing a new number.
    ledger.note(proof(0, "f0", "d0"), pool="b", name="b-0")
    ledger.note(proof(1, "f0", "c0"), pool="a", name="a-0")
    ledger.note(proof(2, "f2", "c2"), pool="a", name="a-0")
    with pytest.raises(AdmissionRefused, match=r"a-1 as version 2 .* part of an update was lost"):
        ledger.note(proof(2, "f2", "c0"), pool="a", name="a-1")
    with pytest.raises(AdmissionRefused, match="version number changed and the weights did not"):
        ledger.note(proof(3, "f3", "c2"), pool="a", name="a-0")
    # One that was just started on the files knows better than one that was updated.
    ledger.note(proof(2, "f2", "e2"), pool="a", name="a-2", is_fresh=True)
    ledger.note(proof(2, "f2", "e2"), pool="a", name="a-1")
    # An engine without a checksum is not judged by one.
    ledger.note(proof(4, "f4", ""), pool="a", name="a-0")


def test_probes_find_no_prefix_that_an_earlier_probe_left():
    salts = [
        {request.cache_salt for request in probe_requests((1, 2), name="r", number=number)}
        for number in (1, 2)
    ]
    assert [len(one) for one in salts] == [1, 1]
    assert salts[0].isdisjoint(salts[1])
    assert None not in salts[0] | salts[1]
