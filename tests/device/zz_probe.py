import warnings, traceback, functools
from collections import Counter
import torch, torch.distributed as dist, torch.nn.functional as F
from tests.device.waits import waits
from tests.device.test_device import RATE, batch, small_model
import tests.device.test_waits as tw

STEPS, WINDOWS = 4, 3

class WithBuffers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(8,8); self.b=torch.nn.Linear(8,1); self.register_buffer("seen", torch.zeros(3)); self.register_buffer("n", torch.zeros((), dtype=torch.int64))
        self.extra = torch.nn.Linear(8, 8)
    def __getitem__(self, i): return (self.a, None, self.b)[i]
    def forward(self, x, extra=False):
        self.seen.add_(1); self.n.add_(1)
        h = torch.tanh(self.a(x))
        if extra: h = h + self.extra(h)
        return self.b(h)

def replicate(model):
    from torch.distributed._composable.replicate import replicate
    return replicate(model)
def replicate_fsdp(model):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cuda", (2,))
    for l in (model[0], model[2]): replicate(l, mesh=mesh)
    return replicate(model, mesh=mesh)
ENGINES = {**tw.ENGINES, "replicate": replicate, "replicate_fsdp": replicate_fsdp, "DDP views": functools.partial(tw.plain_ddp, gradient_as_bucket_view=True)}

def S(name, loop="plain", loss="mean", model="small", extra=None, **options): return dict(name=name, loop=loop, loss=loss, model=model, extra=extra, options=options)
SC = [
 S("plain"), S("clip+over", "known", clip_norm=1.0), S("LossSum over unknown","unknown", "sum on the device", clip_norm=1.0),
 S("buffers", model="buffers"), S("buffers over", "known", model="buffers"), S("buffers over unknown", "unknown", model="buffers"),
 S("unused", model="buffers", extra=lambda r, n: False),
 S("unused on one rank", model="buffers", extra=lambda r, n: r == 0),
 S("early only", model="buffers", extra=lambda r, n: n % 4 < 2),
 S("early only, over", "known", model="buffers", extra=lambda r, n: n % 4 < 2),
 S("shard", sync="shard"), S("shard unused", sync="shard", model="buffers", extra=lambda r, n: False), S("shard one", sync="shard", model="buffers", extra=lambda r, n: r == 0), S("each unused", sync="each", model="buffers", extra=lambda r, n: False), S("callable steps", steps=lambda w: 4), S("callable steps over", "known", steps=lambda w: 4), S("callable steps unknown", "unknown", steps=lambda w: 4),
 S("skip plain", skip=ValueError), S("skip unknown", "unknown", skip=ValueError), S("skip+nonfinite over", "known", skip=ValueError, nonfinite="skip"),
 S("nonfinite raise", nonfinite="raise", clip_norm=1.0),
 S("scaler over", "known", "scaled"), S("scaler over unknown", "unknown", "scaled"), S("scaler+nonfinite", "plain", "scaled", nonfinite="skip"),
 S("scaler+clip", "plain", "scaled", clip_norm=1.0),
 S("each over unknown", "unknown", sync="each"), S("fit", fit=True), S("fit over", "known", fit=True),
 S("overlap1", overlap=1), S("overlap1 over", "known", overlap=1), S("overlap4", overlap=4), S("compress", compress="bf16"),
 S("carry over", "known", tail="carry"),  S("on_update", on_update=lambda p: None),
 S("iter", "iter"), S("iter plain backward", "iter plain"), S("iter sized", "iter sized"), S("iter sized plain", "iter sized plain"), S("iter unsized", "iter unsized"), S("iter count", "iter", "sum on the device"), S("iter scaled", "iter", "scaled"),
]

def one(engine, s):
    import gradsync
    from tests.device.fake import catch_up
    model = ENGINES[engine]((WithBuffers() if s["model"] == "buffers" else small_model()).to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    extra = [tw._scaler(engine)] if s["loss"] == "scaled" else []
    rank = dist.get_rank() if dist.is_initialized() else 0
    items = [(*[t.to("cuda") for t in batch(rank, n)], n) for n in range(STEPS*WINDOWS)]
    options = dict(s["options"]); steps = options.pop("steps", STEPS)
    def lossof(model, item):
        catch_up()
        x, y, n = item
        out = model(x, s["extra"](rank, n)) if s["extra"] else (model(x, True) if s["model"]=="buffers" else model(x))
        return F.mse_loss(out, y)
    found = {"held": [], "boundary": []}
    if s["loop"].startswith("iter"):
        it = {"iter": None, "iter plain": None}.get(s["loop"], 0)
        plain = "plain" in s["loop"]
        if it is None: gen = zip(gradsync.sync_every(model, steps), items)
        elif "unsized" in s["loop"]: gen = gradsync.sync_every(model, steps, iter(items))
        else: gen = gradsync.sync_every(model, steps, items)
        gen = iter(gen)
        for n in range(len(items)):
            with waits() as w:
                step, item = next(gen)
                loss = lossof(model, item)
                if extra: loss = extra[0].scale(loss)
                if plain: (loss/4).backward()
                elif s["loss"].startswith("sum"): step.backward(loss*4, count=(item[1] > -100).sum())
                else: step.backward(loss)
            if step.last:
                (extra[0].step(optimizer), extra[0].update()) if extra else optimizer.step()
                optimizer.zero_grad()
            if n >= STEPS: found["boundary" if n % STEPS == STEPS-1 else "held"].append(w)
        for _ in gen: pass
        return found
    @gradsync.accumulating(steps=steps, **options)
    def step(model, optimizer, item, *extra):
        loss = lossof(model, item)
        if s["loss"] == "sum on the device": return gradsync.LossSum(loss*4, (item[1] > -100).sum())
        return loss
    loop = {"plain": lambda: items, "known": lambda: step.over(items), "unknown": lambda: step.over(iter(items))}[s["loop"]]
    gen = iter(loop())
    for n in range(len(items)):
        with waits() as w:
            item = next(gen)
            step(model, optimizer, item, *extra)
        if n >= STEPS: found["boundary" if n % STEPS == STEPS-1 else "held"].append(w)
    for _ in gen: pass
    if options.get("overlap"): step.settle()
    return found

def case(engine, s):
    warnings.simplefilter("ignore")
    try: return one(engine, s)
    except Exception as e: return (f"{type(e).__name__}: {str(e)[:150]}" if "GradSync" in type(e).__name__ else traceback.format_exc()[-900:])

def all_of(engine, names):
    out = {}
    for s in SC:
        if names and s["name"] not in names: continue
        out[s["name"]] = r = case(engine, s)
        if isinstance(r, str) and "GradSync" not in r and "Error" in r: pass
    return out

if __name__ == "__main__":
    import sys
    sys.modules["i11probe"] = sys.modules["__main__"]
