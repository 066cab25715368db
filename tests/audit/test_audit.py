"""The audit says what a loop really does: held against the collectives that torch's flight recorder saw, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsync._audit import audit
from gradsync._audit import backward as backward_module
from gradsync._audit.counts import Counts, Stretch
from gradsync._audit.report import AuditReport
from gradsync._errors import GradSyncError
from tests.audit import loops
from tests.support.programs import Programs

LIMIT = 120  # seconds for all loops of one number of ranks
WINDOWS, BACKWARDS, NUMEL = 3, 12, 66
PER_SYNC_SHARDED = 36 + 72  # elements of `shard()`'s two layers


def run_ranks(programs: Programs, ranks: int, directory: Path) -> list[dict[str, Any]]:
    running = [
        programs.start("-m", "tests.audit.loops", str(rank), str(ranks), str(directory), limit=LIMIT)
        for rank in range(ranks)
    ]
    results = []
    for rank, program in enumerate(running):
        _, printed, complaints = program.ended()
        written = directory / f"{ranks}-{rank}.json"
        if not written.exists():
            pytest.fail(f"rank {rank} of {ranks} ended without a result: {(printed + complaints)[-3000:]}")
        results.append(json.loads(written.read_text()))
    return results


@pytest.fixture(scope="session")
def two_ranks(programs, tmp_path_factory):
    return run_ranks(programs, 2, tmp_path_factory.mktemp("audit2"))


@pytest.fixture(scope="session")
def four_ranks(programs, tmp_path_factory):
    return run_ranks(programs, 4, tmp_path_factory.mktemp("audit4"))


def outcomes(ranks: list[dict[str, Any]], loop: Callable) -> list[SimpleNamespace]:
    """What each rank saw in a loop of loops.py."""
    name, found = loop.__name__, []
    for rank, results in enumerate(ranks):
        assert name in results, f"rank {rank} did not get to {name}: {[k for k, v in results.items() if 'failed' in v]}"
        assert "failed" not in results[name], results[name]["failed"]
        found.append(SimpleNamespace(**results[name]))
    return found


def elements_reduced(one: SimpleNamespace, *, own: int = 0) -> int:
    """Elements that were really all-reduced, without scalars, the map of used parameters, and the loop's `own`."""
    reduced = [numel for op, numel, dtype in one.collectives if op == "all_reduce" and numel > 1 and dtype != "Int"]
    return sum(reduced) - own


def times_reduced(one: SimpleNamespace, size: int) -> int:
    return sum(op == "all_reduce" and numel == size for op, numel, _ in one.collectives)


# loop: (syncs, wasted, missed, words of its advice)
KNOWN_BUGS = {
    loops.never_held: (12, 9, 0, "9 of 12 synchronisations were wasted"),
    loops.no_sync_around_backward_alone: (12, 9, 0, "put the forward inside no_sync as well"),
    loops.first_synchronises_too: (6, 3, 0, "Run forward and backward of every micro-batch but the last"),
    loops.first_instead_of_last: (3, 0, 3, "off by one"),
    loops.flag_flipped_after_forward: (3, 0, 3, "before the forward"),
    loops.bypassed: (0, 0, 3, "not model.module(x)"),
    loops.static_graph_never_held: (12, 8, 0, "8 of 12 synchronisations were wasted"),
}


@pytest.mark.parametrize("loop", KNOWN_BUGS)
def test_each_known_bug_is_found_and_named(two_ranks, loop):
    """Rows 3 to 7 of the list of what users run into: the count is the true one, and the advice is the right one."""
    syncs, wasted, missed, words = KNOWN_BUGS[loop]
    for one in outcomes(two_ranks, loop):
        assert elements_reduced(one) == NUMEL * syncs, "the loop itself is not what the test means"
        assert (one.backwards, one.syncs, one.updates) == (BACKWARDS, syncs, WINDOWS)
        assert (one.wasted, one.missed, one.discarded) == (wasted, missed, 0)
        assert one.bytes == 4 * NUMEL * syncs
        assert len(one.advice) == 1
        assert words in one.advice[0]
        assert one.advice[0] in one.text


def test_a_tail_that_never_synchronised_is_missed(two_ranks):
    """Row 3: the loop steps on what the short last window left, and no rank told the other."""
    for one in outcomes(two_ranks, loops.tail_never_synchronised):
        assert elements_reduced(one) == NUMEL
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (6, 1, 2, 0, 1)
        assert "1 of 2 optimizer steps used gradients that were held back" in one.advice[0]
        assert "short window" in one.advice[0]


def test_a_bare_model_on_several_ranks_misses_every_step(two_ranks):
    """Without an engine nothing brings the gradients together."""
    for one in outcomes(two_ranks, loops.bare_on_several_ranks):
        assert one.collectives == []
        assert (one.backwards, one.syncs, one.updates, one.bytes, one.missed) == (3, 0, 3, 0, 3)
        assert "no engine synchronises, on 2 ranks" in one.advice[0]


def test_parameters_unfrozen_behind_ddps_back_are_missed(two_ranks):
    """DDP reduces what was trainable when it was made: what is unfrozen later stays this rank's own."""
    for one in outcomes(two_ranks, loops.unfrozen_after_ddp_was_made):
        assert elements_reduced(one) == 2 * 24
        assert one.before == [0, 4 * 24]
        assert (one.syncs, one.missed, one.bytes) == (2, 1, 2 * 4 * 24)


RIGHT = {
    loops.right_default: NUMEL,
    loops.right_find_unused: NUMEL,
    loops.right_bucket_views: NUMEL,
    loops.right_small_buckets: NUMEL,
    loops.right_zeroed_in_place: NUMEL,
    loops.right_buffers: 74,
    loops.accelerate_accumulate: NUMEL,
    loops.fabric_no_backward_sync: NUMEL,
    loops.finished_by_a_backward_of_its_own: NUMEL,
}


@pytest.mark.parametrize("loop", RIGHT)
def test_right_loops_pass_whatever_else_is_on_the_wire(two_ranks, loop):
    """Bucket rebuilds, buffers, the map of used parameters and the number of buckets do not count."""
    for one in outcomes(two_ranks, loop):
        ledger = 6 * WINDOWS if loop is loops.finished_by_a_backward_of_its_own else 0
        assert elements_reduced(one, own=ledger) == RIGHT[loop] * WINDOWS
        assert (one.backwards, one.syncs, one.updates) == (BACKWARDS, WINDOWS, WINDOWS)
        assert one.bytes == 4 * RIGHT[loop] * WINDOWS
        assert (one.wasted, one.missed, one.discarded, one.advice) == (0, 0, 0, [])


def test_the_traffic_that_does_not_count_was_there(two_ranks):
    """The right loops above do rebuild buckets, broadcast buffers, and exchange the map of used parameters."""
    default, unused, buffers, small = (
        outcomes(two_ranks, loop)[0].collectives
        for loop in (loops.right_default, loops.right_find_unused, loops.right_buffers, loops.right_small_buckets)
    )
    assert [op for op, _, dtype in default if dtype == "Int"] == ["broadcast", "broadcast"]
    assert ["all_reduce", 4, "Int"] in unused
    assert buffers.count(["broadcast", 12, "Float"]) == WINDOWS
    assert sum(op == "all_reduce" for op, *_ in small) == 1 + 4 * (WINDOWS - 1)


def test_accelerates_and_fabrics_own_objects_are_taken(two_ranks):
    """What their `prepare` and `setup` return goes into audit as it is."""
    accelerate, fabric = (
        outcomes(two_ranks, loop)[0].wrapped for loop in (loops.accelerate_accumulate, loops.fabric_no_backward_sync)
    )
    assert accelerate == ["DistributedDataParallel", "AcceleratedOptimizer"]
    assert fabric == ["_FabricModule", "FabricSGD"]


def test_a_static_graphs_first_synchronisation_is_no_waste(two_ranks):
    """torch demands it: SNNS, NNNS, NNNS is as good as it gets."""
    for one in outcomes(two_ranks, loops.right_static_graph):
        assert elements_reduced(one) == NUMEL * 4
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (BACKWARDS, 4, WINDOWS, 0, 0)


def test_a_static_graph_that_is_bypassed_is_missed(two_ranks):
    """Its first synchronisation is told by another sign than the others, which must not come by itself."""
    for one in outcomes(two_ranks, loops.static_graph_bypassed):
        assert elements_reduced(one) == 0
        assert (one.backwards, one.syncs, one.updates, one.missed) == (3, 0, 3, 3)


def test_what_gradsync_reduces_past_the_reducer_counts(two_ranks):
    """A static graph's hooks cannot be run once more, so that its engine reduces the buckets itself."""
    for one in outcomes(two_ranks, loops.static_graph_reduced_by_hand):
        assert elements_reduced(one) == NUMEL * (4 + WINDOWS)
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (BACKWARDS, WINDOWS, WINDOWS, 0, 0)


def test_a_users_communication_hook_stays_and_is_seen_through(two_ranks):
    """It ran for each synchronisation, and what it sent was half as much; `bytes` is of the gradients themselves."""
    for one in outcomes(two_ranks, loops.users_communication_hook):
        assert one.calls == one.syncs == 6
        assert times_reduced(one, NUMEL) == 6
        assert {dtype for op, _, dtype in one.collectives if op == "all_reduce"} == {"Half"}
        assert (one.wasted, one.missed, one.bytes) == (3, 0, 6 * 4 * NUMEL)


def test_a_users_own_collectives_do_not_count(two_ranks):
    """Of the size of a bucket, in forward and inside the backward itself; and a loss that is averaged for the log."""
    for one in outcomes(two_ranks, loops.users_own_collectives):
        assert elements_reduced(one, own=one.own * NUMEL) == WINDOWS * NUMEL
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (BACKWARDS, WINDOWS, WINDOWS, 0, 0)


def test_a_reducer_that_is_armed_late_counts(two_ranks):
    """As gradsync does it: DDP's own forward never runs, and its flag is False throughout."""
    for one in outcomes(two_ranks, loops.late_armed_by_hand):
        assert elements_reduced(one) == 4 * WINDOWS * NUMEL
        assert len(one.numbers) == 4
        assert all(numbers == [BACKWARDS, WINDOWS, WINDOWS, 0, 0] for numbers in one.numbers.values())


def test_a_synchronisation_without_a_backward_counts(two_ranks):
    """A zero backward at the leaves, or one of nothing at all; the third window has neither, and is missed."""
    for one in outcomes(two_ranks, loops.synchronised_without_a_backward):
        assert elements_reduced(one) == 2 * NUMEL
        assert one.seen == [[1, 0, 0], [2, 0, 0], [2, 0, 0]]
        assert (one.syncs, one.updates, one.wasted, one.missed) == (2, 3, 0, 1)


def test_a_loss_in_two_parts_synchronises_once(two_ranks):
    """Two backwards of one armed forward each send some of the buckets."""
    for one in outcomes(two_ranks, loops.loss_in_two_parts):
        assert elements_reduced(one) == WINDOWS * 66
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (6, 3, 3, 0, 0)


def test_compiled_models_are_seen_through(two_ranks):
    """A compiled DDP, and the DDP of a compiled module."""
    for one in outcomes(two_ranks, loops.compiled_both_ways):
        assert elements_reduced(one) == 2 * 6 * NUMEL
        assert one.numbers == [[BACKWARDS, 6, WINDOWS, 3, 0]] * 2


@pytest.mark.parametrize("loop", [loops.reentrant_checkpoints, loops.composable_replicate])
def test_other_ways_into_the_reducer(two_ranks, loop):
    """Segments with graphs of their own are one backward; a DDP that is made in the first forward is found."""
    for one in outcomes(two_ranks, loop):
        assert elements_reduced(one) == 6 * NUMEL
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (BACKWARDS, 6, WINDOWS, 3, 0)


def test_each_engine_of_a_larger_module_counts_for_itself(two_ranks):
    """One is held as it should be, the other never: three synchronisations of one, twelve of the other."""
    for one in outcomes(two_ranks, loops.engines_inside_a_larger_module):
        assert (times_reduced(one, 36), times_reduced(one, 28)) == (3, 12)
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (BACKWARDS, 15, WINDOWS, 9, 0)


def test_a_bare_head_on_a_wrapped_trunk_is_missed(two_ranks):
    """The trunk synchronises; the head's gradients are this rank's own."""
    for one in outcomes(two_ranks, loops.bare_head_on_a_wrapped_trunk):
        assert (times_reduced(one, 36), times_reduced(one, 14)) == (3, 0)
        assert (one.syncs, one.wasted, one.missed) == (3, 0, 3)


def test_a_bystanders_backwards_do_not_confuse(two_ranks):
    """Another model synchronises between, and within the same backward; it is not audited."""
    for one in outcomes(two_ranks, loops.bystander_model):
        assert (times_reduced(one, 30), times_reduced(one, NUMEL)) == (one.others, WINDOWS)
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (BACKWARDS, WINDOWS, WINDOWS, 0, 0)


def test_a_gan_may_hold_its_other_half(two_ranks):
    """Two models, two optimizers, and each backward is one model's."""
    for one in outcomes(two_ranks, loops.gan_with_the_other_model_held):
        assert (times_reduced(one, 30), times_reduced(one, 42)) == (WINDOWS, WINDOWS)
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (6, 6, 6, 0, 0)


def test_a_gans_polluted_half_is_wasted(two_ranks):
    """The discriminator is reduced in the generator's backward, then cleared; the last one is followed by nothing."""
    for one in outcomes(two_ranks, loops.gan_polluted):
        assert (times_reduced(one, 30), times_reduced(one, 42)) == (WINDOWS, 2 * WINDOWS)
        assert (one.syncs, one.updates, one.wasted, one.missed) == (9, 6, 2, 0)
        assert "another model's backward" in one.advice[0]


def test_a_window_that_a_scaler_skips_is_no_waste(two_ranks):
    """Every rank had to see the gradients to skip it together. Cleared with None and in place."""
    for one in outcomes(two_ranks, loops.scaler_that_skips):
        assert elements_reduced(one) == 2 * WINDOWS * NUMEL
        for numbers in (vars(one), one.in_place):
            assert [numbers[key] for key in ("syncs", "updates", "wasted", "missed", "discarded")] == [3, 2, 0, 0, 1]
            assert numbers["advice"] == []


def test_a_loop_that_raises_leaves_everything_as_it_was(two_ranks):
    """Also with a backward broken off in the middle, which does not hide the next one's beginning."""
    for one in outcomes(two_ranks, loops.a_loop_that_raises):
        assert one.broken
        assert one.same
        assert elements_reduced(one) == NUMEL * (one.first + 1)
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (4, 1, 1, 0, 0)


def test_audits_nest_and_are_read_inside(two_ranks):
    """Each counts what happened since it began, and its numbers are there while it runs."""
    for one in outcomes(two_ranks, loops.nested_audits):
        assert elements_reduced(one) == 2 * NUMEL
        assert one.live == [0, 1, 1, 2]
        assert one.inner == [1, 1, 0, 0]
        assert (one.backwards, one.syncs, one.updates, one.wasted) == (2, 2, 1, 1)
        assert one.same


def test_a_wrapper_after_a_ddp_behind(two_ranks):
    for one in outcomes(two_ranks, loops.a_wrapper_after_a_ddp_behind):
        assert (one.syncs, one.updates, one.missed) == (1, 1, 0)


def test_an_engine_that_it_cannot_see_into_is_refused(two_ranks):
    """Rather than a report of zeros; and nothing stays behind."""
    for one in outcomes(two_ranks, loops.engines_that_it_cannot_see_into):
        python_reducer, delayed, fsdp1 = one.told
        assert "made with delay_all_reduce_named_params" in delayed
        assert 'optimize_ddp="python_reducer"' in python_reducer
        assert "FullyShardedDataParallel (FSDP1), whose reductions it cannot see" in fsdp1


SHARDED = {
    loops.fsdp2_right: (3, 0, 0, ""),
    loops.fsdp2_never_held: (12, 9, 0, "set_requires_gradient_sync(False) before every micro-batch but the last"),
    loops.fsdp2_first_instead_of_last: (3, 0, 3, "off by one"),
    loops.fsdp2_tail_never_synchronised: (0, 0, 3, "set_requires_gradient_sync(True) before the last"),
    loops.fsdp2_bf16_reduction: (6, 3, 0, "were wasted"),
}


@pytest.mark.parametrize("loop", SHARDED)
def test_fsdp2_is_counted_by_its_reductions(two_ranks, loop):
    """All groups of a model are one engine; on gloo a reduce-scatter is an all-reduce of the whole gradient."""
    syncs, wasted, missed, words = SHARDED[loop]
    for one in outcomes(two_ranks, loop):
        assert elements_reduced(one) == PER_SYNC_SHARDED * syncs
        assert (one.backwards, one.syncs, one.updates) == (BACKWARDS, syncs, WINDOWS)
        assert (one.wasted, one.missed, one.bytes) == (wasted, missed, 4 * PER_SYNC_SHARDED * syncs)
        assert words in " ".join(one.advice)
        assert bool(one.advice) == bool(words)
        assert not one.left


def test_fsdp2_synchronised_without_a_backward_counts(two_ranks):
    """What is held is reduced outside of any backward."""
    for one in outcomes(two_ranks, loops.fsdp2_synchronised_without_a_backward):
        assert elements_reduced(one) == PER_SYNC_SHARDED * WINDOWS
        assert (one.backwards, one.syncs, one.updates, one.wasted, one.missed) == (BACKWARDS, WINDOWS, WINDOWS, 0, 0)


def test_fsdp2_can_be_entered_between_forward_and_backward(two_ranks):
    """The backward inside counts; the one after the audit runs through what it had hung in, and does not."""
    for one in outcomes(two_ranks, loops.fsdp2_entered_between_forward_and_backward):
        assert elements_reduced(one) == 2 * PER_SYNC_SHARDED
        assert (one.backwards, one.syncs, one.updates, one.missed) == (1, 1, 1, 0)


HSDP = {
    # loop: (reduce-scatters, all-reduces across replicas, wasted, missed)
    loops.hsdp_right: (3, 3, 0, 0),
    loops.hsdp_all_reduce_deferred: (12, 3, 0, 0),
    loops.hsdp_never_held: (12, 12, 9, 0),
    loops.hsdp_all_reduce_never_done: (12, 0, 0, 3),
}


@pytest.mark.parametrize("loop", HSDP)
def test_hsdp_is_synchronised_by_its_all_reduce(four_ranks, loop):
    """A reduce-scatter alone leaves the replicas apart; one that was deferred is no waste."""
    scatters, all_reduces, wasted, missed = HSDP[loop]
    for one in outcomes(four_ranks, loop):
        assert (times_reduced(one, 72), times_reduced(one, 18)) == (scatters, all_reduces)
        assert (one.backwards, one.syncs, one.updates) == (BACKWARDS, all_reduces, WINDOWS)
        assert (one.wasted, one.missed, one.bytes) == (wasted, missed, 4 * PER_SYNC_SHARDED * all_reduces)
        assert not one.left


# -- on one rank ---------------------------------------------------------------------------------------------------


def bare(**kwargs):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **kwargs)


def test_one_rank_needs_no_synchronisation():
    """A laptop run passes: nothing is synchronised, and nothing is missed."""
    model, optimizer = bare()
    with audit(model, optimizer) as report:
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert report.backwards == 6
    assert (report.backwards, report.syncs, report.updates, report.bytes) == (6, 0, 2, 0)
    assert (report.wasted, report.missed, report.advice) == (0, 0, [])
    report.check()
    assert str(report).splitlines() == [
        "gradsync audit, rank 0 of 1",
        "  backwards        6",
        "  syncs            0",
        "  updates          2",
        "  wasted           0",
        "  missed           0",
    ]
    assert repr(report) == "<AuditReport: 6 backwards, 0 syncs, 2 updates, 0 wasted, 0 missed>"


def test_what_happens_after_the_audit_is_not_counted():
    """The report stays as it was at the end, and holds neither model nor optimizer."""
    model, optimizer = bare()
    with audit(model, optimizer) as report:
        model(torch.ones(2, 3)).sum().backward()
    lasted = report.seconds
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert (report.backwards, report.updates, report.seconds) == (1, 0, lasted)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert report._settle is None


def test_several_models_and_optimizers():
    """A backward through both is one; each optimizer's step is one."""
    (a, a_optimizer), (b, b_optimizer) = bare(), bare()
    with audit((a, b), [a_optimizer, b_optimizer]) as report:
        (a(torch.ones(2, 3)).sum() + b(torch.ones(2, 3)).sum()).backward()
        a_optimizer.step()
        b_optimizer.step()
    assert (report.backwards, report.updates) == (1, 2)


def test_unfrozen_parameters_are_watched():
    """Gradual unfreezing: a backward that reaches only what was frozen as the audit began is seen."""
    model, optimizer = bare()
    model[0].requires_grad_(False)
    with audit(model, optimizer) as report:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        model[0].requires_grad_(True)
        model(torch.ones(2, 3)).sum().backward()
        model[1].requires_grad_(False)
        model(torch.ones(2, 3)).sum().backward()
    assert report.backwards == 3


def test_a_backward_broken_off_inside_a_checkpoint_hides_no_later_one():
    """A reentrant segment's graph looks like a part of the backward that is still open; a step says that none is."""
    model, optimizer = bare()

    def run():
        x = torch.ones(2, 3, requires_grad=True)
        checkpoint(model, x, use_reentrant=True).sum().backward()

    with audit(model, optimizer) as report:
        handle = model[0].bias.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
        handle.remove()
        optimizer.step()
        run()
        run()
    assert report.backwards == 3


def test_gradients_taken_without_accumulating_are_no_backward():
    """`torch.autograd.grad`, as for a gradient penalty, leaves nothing that an optimizer would use."""
    model, optimizer = bare()
    with audit(model, optimizer) as report:
        torch.autograd.grad(model(torch.ones(2, 3)).sum(), list(model.parameters()))
    assert report.backwards == 0


def test_wrong_arguments():
    """Each is refused with what was needed, what came, and what to do."""
    model, optimizer = bare()
    other, _ = bare()
    with pytest.raises(
        TypeError, match=r"needs a torch\.optim\.Optimizer as its optimizer, or several, but got a Linear"
    ):
        audit(model, model[0]).__enter__()
    with pytest.raises(
        TypeError, match=r"as its model, or several, but got a SGD\. Call it as audit\(model, optimizer\)"
    ):
        audit(optimizer, optimizer).__enter__()
    with pytest.raises(ValueError, match="needs at least one model, but got none"):
        audit([], optimizer).__enter__()
    with pytest.raises(
        ValueError, match=r"none of the model's parameters is in it\. Make the optimizer from the model"
    ):
        audit(other, optimizer).__enter__()


def counted(*, held: bool, timed: bool = True) -> AuditReport:
    """Two wasted of four: synchronising backwards took 5 s, the last 2 of it waiting; held ones 1 s."""
    counts = Counts(backwards=6, syncs=4, updates=2, bytes=1500, rank=1, ranks=2)
    counts.wasted["not held"] += 2
    times = counts.times[frozenset({1})]
    if timed:
        times.num_wasted = 2
        times.synchronised.extend(Stretch(frozenset({1}), 10.0, 13.0, 15.0) for _ in range(4))
    if held:
        times.held.extend(Stretch(frozenset({1}), 10.0, 11.0, 11.0) for _ in range(2))
    return AuditReport(counts, lambda: None)


def test_the_estimate_compares_synchronising_backwards_with_held_ones():
    """The difference of the medians, times the number that was wasted."""
    report = counted(held=True)
    assert report.seconds_wasted == 8.0
    assert "wasted           2  about 8 s of" in str(report)
    assert "1.5 kB of gradients" in str(report)


def test_the_estimate_is_a_lower_bound_where_nothing_was_held():
    """Then it is how long backwards waited once their own work was done."""
    report = counted(held=False)
    assert report.seconds_wasted == 4.0
    assert "at least 4 s of" in str(report)


def test_the_estimate_says_where_there_is_none():
    """Without a backward that was timed there is nothing to compare."""
    report = counted(held=False, timed=False)
    assert report.seconds_wasted is None
    assert "cost not measurable" in str(report)


def test_check_raises_with_the_words_that_are_printed():
    """So that a user puts it into their own test."""
    report = counted(held=True)
    report._counts.missed["bypassed"] += 1
    with pytest.raises(GradSyncError) as raised:
        report.check()
    assert str(raised.value) == " ".join(report.advice)
    assert len(report.advice) == 2
    assert all(sentence in str(report) for sentence in report.advice)
    assert "1 of 2 optimizer steps" in str(raised.value)


def test_an_accelerators_time_is_taken_from_its_events(monkeypatch):
    """No CUDA here: a stand-in keeps the protocol, in which only reading waits."""
    log: list[str] = []

    class Event:
        def __init__(self, device, *, enable_timing):
            assert (device.type, enable_timing) == ("cuda", True)

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 2500.0

    monkeypatch.setattr(backward_module.torch, "Event", Event)
    clock = backward_module.Clock(torch.device("cuda"))
    begin, end = clock.now(), clock.now()
    assert log == ["record", "record"]
    assert clock.seconds(begin, end) == 2.5
    assert log[2:] == ["wait"]
