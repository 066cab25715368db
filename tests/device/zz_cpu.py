import torch, torch.distributed as dist, traceback
def case(where, steps):
    import gradsync
    from torch.distributed.fsdp import fully_shard
    from tests.device.zz_probe import WithBuffers, batch
    m = WithBuffers()
    for l in (m.a, m.b, m): fully_shard(l)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    @gradsync.accumulating(steps=steps)
    def step(model, opt, n):
        x, y = batch(dist.get_rank(), n)
        return torch.nn.functional.mse_loss(model(x, dist.get_rank() == 0), y)
    try:
        for n in range(steps * 2): step(m, opt, n)
    except Exception as e: return traceback.format_exc()[-1500:]
    return step.progress.updates
def plain():
    from torch.distributed.fsdp import fully_shard
    from tests.device.zz_probe import WithBuffers, batch
    m = WithBuffers()
    for l in (m.a, m.b, m): fully_shard(l)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    try:
        for n in range(2):
            x, y = batch(dist.get_rank(), n)
            torch.nn.functional.mse_loss(m(x, dist.get_rank() == 0), y).backward(); opt.step()
    except Exception as e: return traceback.format_exc()[-1500:]
    return "ok"
if __name__ == "__main__":
    from tests.support.ranks import Ranks
    import sys
    for a in (2,):
        r = Ranks(2)
        try: print(a, *r.outcomes(case, 0, a, limit=40), sep="\n")
        except Exception as e: print(e)
        r.stop()
    r = Ranks(2); print(*r.outcomes(plain, limit=40), sep="\n"); r.stop()
