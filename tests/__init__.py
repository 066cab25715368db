"""One folder a subject; a case stands above the test that runs it.

    exact/        the mean of all micro-batches of all ranks, at every length; to the bit where that is promised
    uneven/       ranks that differ: lengths, known or not, engines whose forward waits, what ranks have to agree on
    decorator/    `accumulating`: who takes part, windows, `over`, the boundary, `progress`, errors
    iterator/     `sync_every`
    functional/   the arithmetic below both, `no_sync`, `sync_gradients`
    engines/      each engine's promises, what it sends, and what it needs of torch's privates
    resume/       states: saved in the middle of a window, gone on with elsewhere
    faults/       ranks that die, links that are cut, jobs that start again
    programs/     random programs of all of it, against a model (`python -m tests.programs`)
    comparison/   other tools, and the loop that everybody writes
    audit/, bench/, docs/, surface/, typing_/    what their names say
    measure/      scripts behind the README's figures; no tests
    support/      what they share: ranks, programs, models, the float64 reference, the comparator, engines, counters

A test that needs ranks takes the `ranks` fixture: `ranks(2).run(case, *args)` runs a module-level function on two real ranks.
One that needs a program of its own takes `programs`: `programs.run(file)` has its exit code, output and complaints.
"""
