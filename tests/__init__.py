"""One folder a subject; a case stands above the test that runs it.

    exact/        the mean of all micro-batches of all ranks, at every length; to the bit where that is promised
    uneven/       ranks that differ: lengths, known or not, engines whose forward waits, what ranks have to agree on
    decorator/    `accumulating`: who takes part, windows, `over`, the boundary, `progress`, errors
    iterator/     `sync_every`
    loops/        how loops end on both, and a loop that keeps its own `loss.backward()`
    functional/   what both are made of: public names on one rank and on two, another decorator, `no_sync`
    numbers/      counts, `progress` and scalers, in all types
    changes/      models, optimizers, schedulers and groups that change between windows, and leaks
    hooks/        hooks on parameters
    newcomers/    what somebody does who has not read the documentation; the words of errors
    engines/      each engine's promises, what it sends, and what it needs of torch's privates
    overlap/      gradients that travel while the next window computes
    parts/        micro-batches that do not fit in memory
    resume/       states: saved in the middle of a window, gone on with elsewhere
    faults/       ranks that die, links that are cut, jobs that start again
    launch/       `process_group` and `ddp`
    device/       what is launched on a device and what waits for it, on a device that is made here
    programs/     random programs of all of it, against a model (`python -m tests.programs`)
    comparison/   other tools, and the loop that everybody writes
    surface/      the public names, and the shape of the package: who imports what, lengths, state
    audit/, bench/, verify/, docs/, typing_/    what their names say
    measure/      scripts behind figures in the documentation, on other torches and with others' models; no tests
    support/      what they share: ranks, programs, models, the reference, comparator, verdicts, engines, counters

A test that needs ranks takes the `ranks` fixture: `ranks(2).run(case, *args)` runs a module-level function on two real ranks.
One that needs a program of its own takes `programs`: `programs.run(file)` has its exit code, output and complaints.
"""
