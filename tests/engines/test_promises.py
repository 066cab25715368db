"""Promises of the engines beside the table of test_engines_table.py, on real ranks."""

from __future__ import annotations

import pytest

CASES = "tests.engines.promises:"

FSDP2 = ["fsdp2", "fsdp2_gathered", "replicate_fsdp"]


# What the three micro-batches of a window send, and a flush after two. Three groups: two blocks and the root. A gather
# each in forward, and for the blocks in backward again; a reduction a group. A flush adds the ranks' agreement.
WIRE = {
    "ddp": [{}, {}, {"all_reduce default_pg": 1}, {"all_reduce default_pg": 2}],
    "replicate": [{}, {}, {"all_reduce default_pg": 1}, {"all_reduce default_pg": 2}],
    "replicate_fsdp": [{}, {}, {"all_reduce default_pg": 3}, {"all_reduce default_pg": 4}],
    "fsdp1_full": [
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5, "all_reduce default_pg": 3},
        {"all_reduce default_pg": 4},
    ],
    "fsdp1_grad_op": [{"all_gather default_pg": 3}, {}, {"all_reduce default_pg": 3}, {"all_reduce default_pg": 4}],
    "fsdp1_no_shard": [{}, {}, {"all_reduce default_pg": 3}, {"all_reduce default_pg": 4}],
    "fsdp2": [
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5, "all_reduce default_pg": 3},
        {"all_reduce default_pg": 4},
    ],
    # set_reshard_after_backward(False): gathered once a window, and not again until the update.
    "fsdp2_gathered": [{"all_gather default_pg": 3}, {}, {"all_reduce default_pg": 3}, {"all_reduce default_pg": 4}],
    "fsdp2_each": [
        *[{"all_gather default_pg": 5, "all_reduce default_pg": 3}] * 3,
        {"all_reduce default_pg": 1},
    ],
    # gloo reduce-scatters by an all-reduce, so that "all_reduce shards" is the reduce-scatter.
    "hsdp_window": [
        {"all_gather shards": 5},
        {"all_gather shards": 5},
        {"all_gather shards": 5, "all_reduce shards": 3, "all_reduce replicas": 3},
        {"all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 1},
    ],
    "hsdp_shard": [
        {"all_gather shards": 5, "all_reduce shards": 3},
        {"all_gather shards": 5, "all_reduce shards": 3},
        # and one more, of a byte a parameter: whether any rank used it
        {"all_gather shards": 5, "all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 1},
        {"all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 2},
    ],
    "hsdp_each": [
        *[{"all_gather shards": 5, "all_reduce shards": 3, "all_reduce replicas": 3}] * 3,
        {"all_reduce default_pg": 1},
    ],
}


@pytest.mark.parametrize("engine", WIRE)
def test_what_a_window_sends(ranks, engine):
    """Held micro-batches reduce nothing, the boundary each group once, and a flush without a backward as much."""
    for sent in ranks(4 if "hsdp" in engine else 2).run("tests.engines.counts:window", engine):
        assert sent == WIRE[engine]


@pytest.mark.parametrize(("engine", "size"), [*((one, 2) for one in FSDP2), ("hsdp_window", 4), ("hsdp_shard", 4)])
@pytest.mark.parametrize("case", ["switches_are_put_back", "discarding_leaves_nothing"])
def test_fsdp2_is_left_as_it_was_found(ranks, engine, size, case):
    """Its switches whatever their user had set, nested, and after exceptions; and no gradient inside it."""
    ranks(size).run(CASES + case, engine)


@pytest.mark.parametrize("engine", ["fsdp2", "replicate_fsdp"])
def test_held_gradients_can_be_taken_and_put_back(ranks, engine):
    """Whole, by parameter: what a state in the middle of a window needs."""
    ranks(2).run(CASES + "held_gradients_can_be_taken_and_put_back", engine)


@pytest.mark.parametrize("engine", ["fsdp1_full", "fsdp1_full_orig", "fsdp1_grad_op", "fsdp1_no_shard_orig", *FSDP2])
def test_the_window_after_an_exception(ranks, engine):
    """Nothing of the iteration that failed is left in the engine."""
    ranks(2).run(CASES + "after_an_exception", engine)


@pytest.mark.parametrize("engine", ["fsdp2", "hsdp_shard"])
def test_parameters_that_are_unfrozen_later(ranks, engine):
    """Gradual unfreezing, between windows."""
    ranks(4 if "hsdp" in engine else 2).run(CASES + "unfreezing", engine)


@pytest.mark.parametrize(
    "case", ["a_part_of_a_model", "mixed_precision_with_a_module_that_never_ran", "held_gradients_add_up_in_float32", "cpu_offload"]
)
def test_fsdp2_in_parts_and_policies(ranks, case):
    """One block alone; mixed precision and CPU offload."""
    ranks(2).run(CASES + case)


@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp1_full", "fsdp1_full_orig", "fsdp1_grad_op", *FSDP2])
@pytest.mark.parametrize("case", ["bystanders", "a_forward_before_the_first_call"])
def test_other_forwards(ranks, engine, case):
    """Of models that another step trains, and of evaluations."""
    ranks(2).run(CASES + case, engine)


@pytest.mark.parametrize("engine", ["bare", "ddp", "replicate", "ddp_fsdp2", "fsdp2"])
def test_a_sharded_teacher_of_ranks_of_unequal_length(ranks, engine):
    """Ranks run equally many forwards where any model of the step needs that."""
    ranks(2).run(CASES + "a_sharded_teacher_of_ranks_of_unequal_length", engine)


@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp1_full", "fsdp1_full_orig", "fsdp1_no_shard", *FSDP2])
def test_a_replay_weighs_nothing(ranks, engine):
    """The hooks sit where gradients arrive."""
    ranks(2).run(CASES + "a_replay_weighs_nothing", engine)


@pytest.mark.parametrize("engine", ["ddp", "fsdp1_full", "fsdp1_full_orig", "fsdp1_no_shard", *FSDP2])
def test_gradients_of_somebody_else(ranks, engine):
    """Are an error, wherever the engine keeps them."""
    ranks(2).run(CASES + "gradients_of_somebody_else", engine)


@pytest.mark.parametrize("case", ["a_plain_scaler_on_fsdp1", "another_divide_factor"])
def test_what_would_be_silently_wrong_is_an_error(ranks, case):
    """Found by gradsync, because torch says nothing."""
    ranks(2).run(CASES + case)


def test_a_users_engine_is_twenty_lines(ranks):
    """Unknown ones are refused by name, and say how to register."""
    ranks(2).run(CASES + "a_users_engine")


@pytest.mark.parametrize(
    "case",
    [
        "gradients_of_several_meshes",
        "partial_reductions_of_the_users_own",
        "hybrid_on_a_part_of_the_ranks",
        "tensor_parallel_without_data_parallel",
    ],
)
def test_beyond_data_parallel(ranks, case):
    """Norms, clipping and discarding; groups of a part of the ranks."""
    ranks(4).run(CASES + case)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([3, 3, 5, 3], ["rank 0 has [3, 5], rank 1 has [3, 3]", "rank 2 has [3, 5], rank 3 has [3, 3]"]),
        ([3, 0, 3, 3], ["rank 0 has [3, 3], rank 1 has [0, 3]", "rank 2 has [3, 3], rank 3 has [0, 3]"]),
    ],
)
@pytest.mark.parametrize("dimensions", [{"data": 2}, {"replicas": 2, "shards": 1}], ids=["fsdp2", "hsdp"])
def test_tensor_parallel_ranks_of_unequal_length(ranks, dimensions, lengths, said):
    """Are an error on every rank, of the groups with equal lengths too, before any forward."""
    ranks(4).run(CASES + "tensor_parallel_ranks_of_unequal_length", dimensions, lengths, said, limit=30)


@pytest.mark.parametrize(
    "engine", ["none", "bare", "ddp", "replicate", "fsdp1_full_orig", *FSDP2, "hsdp_window", "hsdp_shard", "hsdp_each"]
)
def test_compiled_models_are_not_compiled_again(ranks, engine):
    """After the second window."""
    ranks(1 if engine == "none" else 4 if "hsdp" in engine else 2).run(CASES + "compiled", engine)
