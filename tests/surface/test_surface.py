"""The public names, exactly; a change here is a change of the contract."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import get_type_hints

import gradsync
from gradsync import functional

PUBLIC = {
    "GradSyncError", "LossSum", "MicroStep", "Progress", "accumulating", "audit", "ddp", "engines", "functional", "no_sync",
    "process_group", "sync_every", "sync_gradients",
}  # fmt: skip


def test_the_public_names():
    assert set(gradsync.__all__) == PUBLIC
    modules = {name for name, value in vars(gradsync).items() if inspect.ismodule(value)}
    named = {name for name in vars(gradsync) if not name.startswith("_")} - modules
    assert named == PUBLIC - {"engines", "functional"}
    assert {"engines", "functional"} <= modules


def test_everything_public_is_documented():
    for name in PUBLIC:
        assert (inspect.getdoc(getattr(gradsync, name)) or "").strip(), name
    for name in gradsync.functional.__all__:
        assert (inspect.getdoc(getattr(gradsync.functional, name)) or "").strip() or name in {"Steps", "NonFinite", "Sync", "Tail"}, name


def test_signatures():
    keywords = "model optimizer scheduler scaler clip_norm tail sync nonfinite skip on_update overlap compress fit".split()
    parameters = inspect.signature(gradsync.accumulating).parameters
    assert list(parameters) == ["steps", *keywords]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in keywords)
    defaults = [parameters[name].default for name in keywords]
    assert defaults == [None, None, None, None, None, "step", "window", "step", (), None, 0, None, False]
    assert list(inspect.signature(gradsync.sync_every).parameters) == ["model", "steps", "iterable"]
    assert list(inspect.signature(gradsync.MicroStep.backward).parameters) == ["self", "loss", "count", "run"]
    assert issubclass(gradsync.GradSyncError, RuntimeError)


def test_annotations_are_there_for_who_asks_at_run_time():
    """Tools that build command lines or pages of documentation ask for them."""
    functions = [getattr(gradsync, name) for name in PUBLIC] + [getattr(functional, name) for name in functional.__all__]
    for one in filter(callable, functions):
        if inspect.isfunction(one) or inspect.isclass(one):
            get_type_hints(one)
        for method in vars(one).values() if inspect.isclass(one) and one.__module__.startswith("gradsync.") else ():
            if inspect.isfunction(method):
                get_type_hints(method)


def test_importing_it_brings_in_nothing_but_its_dependencies():
    """No optional package, and no sharded engine before one is met."""
    code = """if 1:
        import sys, torch, wrapt, typing_extensions
        before = set(sys.modules)
        import gradsync
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        assert not new & {"accelerate", "lightning", "lightning_fabric", "matplotlib", "tqdm", "transformers"}, new
        assert "gradsync.bench" not in sys.modules
        assert "torch.distributed.fsdp" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
