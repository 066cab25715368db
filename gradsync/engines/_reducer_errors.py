"""What a reducer says of a backward that it cannot take, in words for people who perhaps made no reducer.

A module that is bare to its user has DDP behind it; on one process the same backward is right.
"""

from __future__ import annotations

from gradsync._errors import GradSyncError

_TWICE = (
    "Each parameter must get its gradient once in the backward of a boundary, but one got it twice, from two reentrant "
    "checkpoints or from one and the rest of the model, and DistributedDataParallel, which is around or behind the "
    "model, had sent it by then. Make these checkpoints with use_reentrant=False."
)
_SPARSE = (
    "Whether a parameter's gradients are sparse must be as DistributedDataParallel, which is around or behind the "
    "model, found it when it was made, by the flag of nn.Embedding, but a backward brought a gradient of the other "
    "kind. Set sparse= of the nn.Embedding that has the parameter before training begins, and do not pass it to "
    "F.embedding."
)
_GRAPH = (
    "A DistributedDataParallel with static_graph=True needs the same graph in each window, but a backward used a "
    "parameter that the first did not use, or used one more often. Leave static_graph out, or wrap the model anew "
    "after such a change."
)
_TOLD = {
    "has been marked as ready twice": _TWICE,
    "Your training graph has changed in this iteration": _GRAPH,
    "Cannot access storage of SparseTensorImpl": _SPARSE,
    "Expected variable to have sparse gradient": _SPARSE,
}


def clarify(error: BaseException) -> None:
    """Raise a clearer error from this one of the reducer's, if it is one that is known."""
    said = str(error) if isinstance(error, RuntimeError) else ""  # NotImplementedError is one, too
    for theirs, ours in _TOLD.items():
        if theirs in said:
            raise GradSyncError(ours) from error
