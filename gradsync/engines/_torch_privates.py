"""The private names of torch that the engines use, by engine and by the object that has them.

They are looked up whenever an engine is made, so that a torch that has changed is noticed before it is used. The tests
(`tests/engines/test_torch_ddp.py`, `test_torch_sharded.py`) also look up those that exist only after a backward.
"""

from __future__ import annotations

import warnings
from functools import reduce
from typing import TYPE_CHECKING

import torch

from gradsync._state import SAID_OF_TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NEWEST_TRIED = (2, 15)

# By engine: the path to an object, from what the engine is made of, and its names. "a|b": either, by torch's version.
PRIVATES: dict[str, dict[str, str]] = {
    "ddp": {
        "ddp": """
            require_backward_grad_sync require_forward_param_sync find_unused_parameters static_graph process_group
            _delay_all_reduce_params _module_parameters _use_python_reducer _comm_hooks modules_buffers
            broadcast_buffers broadcast_bucket_size device_ids mixed_precision _join_config _compiled_call_impl
            _pre_forward _post_forward _has_rebuilt_buckets parameters_to_ignore
            _build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper _assign_modules_buffers
            _sync_module_buffers _register_builtin_comm_hook _get_ddp_logging_data
            """,
        "ddp.reducer": """
            prepare_for_forward prepare_for_backward _rebuild_buckets _check_reducer_finalized
            _delay_all_reduce _get_local_used_map _get_zeros_like_grad_buckets _run_comm_hook _remove_autograd_hooks
            _set_static_graph _push_all_rebuilt_params _reset_state
            """,
        "ddp.process_group": "get_group_store _get_sequence_number_for_group _get_backend",
    },
    "find_unused": {"C": "_will_engine_execute_node"},
    "replicate": {"state": "lazy_init _init_args _ddp _no_sync _param_list _param_names"},
    "fsdp1": {
        "module": "_sync_gradients _handle _is_root training_state process_group sharding_strategy _device_handle",
        "handle": """
            flat_param uses_sharded_strategy device _reduce_dtype _training_state prepare_gradient_for_optim
            _get_unflat_views _use_unsharded_grad_views _use_sharded_grad_views needs_unshard
            """,
        "handle.flat_param": """
            _params _shapes _shard_param_infos _unpadded_unsharded_size _param_infos _shared_param_infos
            """,
        "runtime": """
            _lazy_init _post_backward_final_callback _reduce_grad _reduce_grad_no_shard _reshard
            _low_precision_hook_enabled
            """,
    },
    "fsdp2": {
        "state": """
            _modules _fsdp_param_groups|_fsdp_param_group _state_ctx _comm_ctx _is_root _lazy_init _training_state
            _root_post_backward_final_callback _device_handle
            """,
        "state._state_ctx": "all_states iter_forward_root post_backward_final_callback_queued",
        "group": """
            fsdp_params mesh_info device is_sharded _to_sharded _training_state reduce_grads all_reduce_grads
            reshard_after_backward gradient_divide_factor _partial_reduce_output _init_mp_dtypes
            """,
        "group.mesh_info": "mesh",
        "param": """
            sharded_param unsharded_accumulated_grad init_unsharded_param init_all_gather_outputs free_unsharded_param
            init_dtype_attrs to_sharded_dtensor _sharded_param_data _sharded_local_tensor mp_policy mesh_info device
            _module_info
            """,
        "param._module_info": "module param_name",
    },
}

# The same for names that exist only when a model has run: only the tests can look them up.
MADE_LATER: dict[str, dict[str, str]] = {
    "fsdp1": {
        "module": "_all_fsdp_states _post_backward_callback_queued _post_backward_stream _all_reduce_stream",
        "handle.flat_param": "_post_backward_called _local_shard _is_grad_none_mask _full_param_padded",
    },
    "fsdp2": {
        "state._comm_ctx": "post_forward_order all_gather_state reduce_scatter_states|reduce_scatter_state",
        "group": "_all_gather_result _post_reduce_event _all_reduce_state _post_forward_indices",
        "param": "_unsharded_param",
    },
}


def missing(names: Mapping[str, str], roots: Mapping[str, object]) -> list[str]:
    """Those of `names` that are not there, as paths from the `roots`."""
    return list(_missing(names, roots))


def check_torch(kind: str, **roots: object) -> None:
    """Warn, once a process, if an engine of this kind meets a torch that it may not know."""
    lost = missing(PRIVATES[kind], roots)
    newest, now = ".".join(map(str, NEWEST_TRIED)), torch.__version__
    if lost:
        _warn(
            f"gradsync's engine {kind!r} uses parts of torch that are private, and torch {now} does not have "
            f"{', '.join(lost)}. It may fail, or synchronise nothing. Use torch {newest}, or run `python -m gradsync "
            "verify` to see what holds."
        )
    elif tuple(int(part) for part in now.split(".")[:2]) > NEWEST_TRIED:
        _warn(
            f"gradsync's engines use parts of torch that are private. They were tried with torch 2.9 to {newest}, and "
            f"this is torch {now}, where all that can be looked up is in its place. Run `python -m gradsync verify` to "
            "see that everything holds."
        )


def _missing(names: Mapping[str, str], roots: Mapping[str, object]) -> Iterator[str]:
    for path, wanted in names.items():
        root, *way = path.split(".")
        try:
            thing = reduce(getattr, way, roots[root])
        except AttributeError:
            yield path
            continue
        for name in wanted.split():
            if not any(hasattr(thing, either) for either in name.split("|")):
                yield f"{path}.{name}"


def _warn(text: str) -> None:
    if text not in SAID_OF_TORCH:
        SAID_OF_TORCH.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
