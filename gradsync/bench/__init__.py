"""`python -m gradsync bench`: what synchronisation costs on your machines, in every way of accumulating.

From the command down to the ranks: `_cli` reads `_arguments` and makes a `_plan`, `_hosts` makes the network,
`_launch` starts the ranks, `_rank` is one of them, and `_measure` times the `_ways` on a workload of `_models`. Back
up: `_summary` turns times into facts with the arithmetic of `_window_cost`; `_report` and `_plot` show them.

A model of your own comes as `--factory module:function`. The function is called with the micro-batch size and the
device, once for each way that is measured, and returns what a training loop is made of::

    def tiny(batch_size, device):
        model = torch.nn.Linear(64, 8).to(device)
        optimizer = torch.optim.Adam(model.parameters())          # or None: plain SGD

        def make_batch():                                         # called a few times, before anything is timed
            return torch.randn(batch_size, 64, device=device)

        def compute_loss(model, batch):                           # the mean loss of one micro-batch, not scaled
            return model(batch).square().mean()

        return model, optimizer, make_batch, compute_loss

`compute_loss` is handed the model as each way wraps it, and must call it, not what is inside it: `model(batch)`.
Every way holds a model of its own: with a large one, choose fewer by `--ways`.
"""
