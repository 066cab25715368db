"""What the decorator and the iterator are made of, for people who build a third.

    item -> Loop -> Run -> Window -> Place -> Share -> Tables -> engines -> Closing -> update

A `Run` opens one window after another, of a `Team`: the engines, ranks and parameters that take part. Each micro-batch
has a `Place` in the open window. In the last place the rank's `Share` leaves as a row of a small table, the engines
synchronise, and what came from all ranks is a `Closing`, with the factor that makes the engines' average the mean. A
`Loop` is data that ends, on each rank at a time of its own. A `Run` refers to models and optimizers weakly; its engines
may hold a DDP.

Another decorator, with tails, `LossSum` and ranks that differ:

>>> from gradsync import functional as gf
>>> def accumulate(steps, model, optimizer):
...     who, loops = gf.Who([model], [optimizer]), []
...     run = gf.Run("accumulate", gf.Terms(steps))
...     run.who = who
...     def settle(closing):
...         if closing is not None:
...             if closing.factor is not None:
...                 gf.update([optimizer], factor=closing.factor)
...             run.close()
...     def decorate(function):
...         def step(batch):
...             place = run.start(who, loops[-1] if loops else None)
...             with run.holding(place):
...                 loss = function(batch)
...                 closing = run.backward(place, loss)
...             settle(closing)
...             return loss
...         def over(items):
...             loop = gf.Loop("accumulate.over", gf.length(items), lambda: [run])
...             loops.append(loop)
...             try:
...                 yield from loop.items(items)
...                 for _, place in loop.rest():
...                     settle(run.miss(place))
...             finally:
...                 loop.end()
...                 loops.remove(loop)
...         step.over = over
...         return step
...     return decorate
>>> model = torch.nn.Linear(1, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> @accumulate(2, model, optimizer)
... def train(batch):
...     return gf.LossSum(model(batch).square().sum(), count=len(batch))
>>> for batch in train.over(torch.ones(5, 3, 1)):
...     loss = train(batch)

On an exception, call `run.discard()`. On engines whose forward communicates, `rest` also gives places of
`Role.REPEATS`: run the last micro-batch once more there, and call `run.backward(place, loss)` in place of `run.miss`.

Smaller parts stand alone: arithmetic (`window_size`, `sizes`, `correction`), gradients (`normalise`, `clip`, `norm`,
`all_finite`, `discard`), engines (`no_sync`, `sync_gradients`), the update (`update`), a whole loop (`sync_every`),
micro-batches that do not fit in memory in such a loop (`fit`), and how large one may be (`rows_that_fit`).
"""

from gradsync._loss import LossSum, detach, find_loss
from gradsync.functional._fit.in_parts import InParts
from gradsync.functional._fit.rows_that_fit import rows_that_fit
from gradsync.functional._iterator.fit import Fitting, fit
from gradsync.functional._iterator.micro_step import MicroStep
from gradsync.functional._iterator.sync_every import sync_every
from gradsync.functional._loop.counted_items import length, with_last
from gradsync.functional._loop.loop import Loop
from gradsync.functional._team.no_sync import no_sync, sync_gradients
from gradsync.functional._team.team import Team
from gradsync.functional._update.grad_scaler import is_scaling
from gradsync.functional._update.gradients import all_finite, clip, discard, norm, normalise
from gradsync.functional._update.optimizers import bare_optimizer, owned
from gradsync.functional._update.schedulers import check_steppable
from gradsync.functional._update.update import NonFinite, Update, update
from gradsync.functional._window.boundary import Boundary, Held, Transport
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.gradient_watch import GradientWatch
from gradsync.functional._window.place import Place, Role
from gradsync.functional._window.run import Run
from gradsync.functional._window.share import Share
from gradsync.functional._window.terms import (
    Steps,
    Sync,
    Tail,
    Terms,
    Who,
    correction,
    ends_with_data,
    sizes,
    window_size,
)
from gradsync.functional._window.window import Window, weigh

__all__ = [
    "Boundary",
    "Closing",
    "Fitting",
    "GradientWatch",
    "Held",
    "InParts",
    "Loop",
    "LossSum",
    "MicroStep",
    "NonFinite",
    "Place",
    "Role",
    "Run",
    "Share",
    "Steps",
    "Sync",
    "Tail",
    "Team",
    "Terms",
    "Transport",
    "Update",
    "Who",
    "Window",
    "all_finite",
    "bare_optimizer",
    "check_steppable",
    "clip",
    "correction",
    "detach",
    "discard",
    "ends_with_data",
    "find_loss",
    "fit",
    "is_scaling",
    "length",
    "no_sync",
    "norm",
    "normalise",
    "owned",
    "rows_that_fit",
    "sizes",
    "sync_every",
    "sync_gradients",
    "update",
    "weigh",
    "window_size",
    "with_last",
]
