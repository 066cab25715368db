import cProfile, pstats, io, time, os
import tests.device.test_waits as tw
def case(engine):
    import warnings; warnings.simplefilter("ignore")
    t0, c0 = time.time(), time.process_time()
    out = []
    pr = cProfile.Profile(); pr.enable()
    tw.scaled_by_hand(engine)
    for s in tw.scenarios_of(engine):
        a, b = time.time(), time.process_time()
        tw.play(engine, s)
        out.append(f"{s.name:40} {time.time()-a:.2f} {time.process_time()-b:.2f}")
    pr.disable()
    s = io.StringIO(); pstats.Stats(pr, stream=s).sort_stats("tottime").print_stats(18)
    return "\n".join(out) + f"\ntotal {time.time()-t0:.1f} cpu {time.process_time()-c0:.1f}\n" + s.getvalue()
if __name__ == "__main__":
    import sys
    from tests.device import run_on_device
    from tests.device.zz_prof import case
    print(run_on_device(case, sys.argv[1])[0])
