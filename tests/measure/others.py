"""Others' objects in a decorated step, as they are: built from a config, nothing is downloaded. Not run by pytest.

    python -m tests.measure.others            # needs: pip install timm peft transformers accelerate lightning-fabric

Each is trained on two ranks, alone and with gradsync; what gradsync did is compared with plain autograd over all ranks' data.
The table says "exact", or the words in which it failed. Each line runs in processes of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch

SIZE, STEPS, WINDOWS = 2, 2, 3


def tokens(rank: int, index: int) -> dict:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    ids = torch.randint(0, 32, (2, 6), generator=generator)
    return {"input_ids": ids, "labels": ids}


def images(rank: int, index: int) -> dict:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return {"x": torch.randn(2, 3, 32, 32, generator=generator)}


def vectors(rank: int, index: int) -> dict:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return {"x": torch.randn(4, 3, generator=generator)}


def small():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)


def mean_square(model, x):
    return model(x).square().mean()


def hugging_loss(model, **batch):
    return model(**batch).loss


# -- each gives (model, optimizer, scheduler or None, loss, data) ---------------------------------------------------


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    return model, adam(model), None, hugging_loss, tokens


def llama_with_a_schedule():
    from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    optimizer = adam(model)
    return model, optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 5), hugging_loss, tokens


def checkpointed_gpt2():
    model, _, _, loss, data = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, adam(model), None, loss, data


def adafactor():
    from transformers import Adafactor

    # Not GPT-2: its key biases have no gradient but rounding, which Adafactor scales up to a whole step.
    model = small()
    return model, Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False), None, mean_square, vectors


def lora():
    from peft import LoraConfig, get_peft_model

    model, _, _, loss, data = gpt2()
    warnings.simplefilter("ignore")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    return model, adam(model), None, loss, data


def prompts():
    from peft import PromptTuningConfig, get_peft_model

    model, _, _, loss, data = gpt2()
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    return model, adam(model), None, loss, data


def ia3():
    from peft import IA3Config, get_peft_model

    model, _, _, loss, data = gpt2()
    warnings.simplefilter("ignore")
    config = IA3Config(target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"], fan_in_fan_out=True)
    model = get_peft_model(model, config)
    return model, adam(model), None, loss, data


def timm_model():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=12, depth=2, num_heads=3, num_classes=4)
    return model, adam(model), None, mean_square, images


def timm_optimizer_and_scheduler():
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    model = small()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.01)
    scheduler = CosineLRScheduler(optimizer, t_initial=6, warmup_t=1, warmup_lr_init=1e-4, t_in_epochs=False)
    return model, optimizer, scheduler, mean_square, vectors


def timm_lamb():
    from timm.optim import Lamb

    model = small()
    return model, Lamb(model.parameters(), lr=1e-3), None, mean_square, vectors


def timm_lookahead():
    from timm.optim import Lookahead

    model = small()
    return model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), k=2), None, mean_square, vectors


def accelerated():
    from accelerate import Accelerator

    model = small()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t)
    with_it = Accelerator(cpu=True)
    return *with_it.prepare(model, optimizer, scheduler), mean_square, vectors


def of_fabric():
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    made.launch()
    model = small()
    model, optimizer = made.setup(model, adam(model))
    return model, optimizer, None, mean_square, vectors


KINDS = {
    "transformers: GPT-2": gpt2,
    "transformers: GPT-2, checkpointed": checkpointed_gpt2,
    "transformers: Llama, cosine schedule with warm-up": llama_with_a_schedule,
    "transformers: Adafactor": adafactor,
    "peft: LoRA": lora,
    "peft: IA3": ia3,
    "peft: prompt tuning": prompts,
    "timm: vision transformer": timm_model,
    "timm: AdamW, CosineLRScheduler by updates": timm_optimizer_and_scheduler,
    "timm: Lamb": timm_lamb,
    "timm: Lookahead": timm_lookahead,
    "Accelerate: model, optimizer, scheduler": accelerated,
    "Fabric: model, optimizer": of_fabric,
}


def torchvision_without_its_extension() -> None:
    """torchvision made for CUDA does not load beside torch for CPU; nobody needs its operators here."""
    try:
        import torchvision  # noqa: F401
    except (RuntimeError, ImportError):
        for name in [n for n in sys.modules if n.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
            library.define(name)
        globals()["_library"] = library


def trained(name: str, ours: bool, rank: int) -> tuple[dict, list[float]]:
    """Parameters and learning rates after the updates."""
    import gradsync

    torch.manual_seed(3)
    model, optimizer, scheduler, loss, data = KINDS[name]()
    model.train()
    rates = []

    def note() -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    if ours:

        @gradsync.accumulating(steps=STEPS)
        def train_step(model, optimizer, scheduler, batch):
            return loss(model, **batch)

        for index in range(WINDOWS * STEPS):
            train_step(model, optimizer, scheduler, data(rank, index))
            if index % STEPS == STEPS - 1:
                note()
    else:
        for window in range(WINDOWS):
            for index in range(window * STEPS, (window + 1) * STEPS):
                for r in range(SIZE):
                    (loss(model, **data(r, index)) / (SIZE * STEPS)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(scheduler, "step_update"):
                scheduler.step_update(num_updates=window + 1)
            elif scheduler is not None:
                scheduler.step()
            note()
    return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}, rates


def on_rank(rank: int, name: str, store: str, pipe) -> None:
    import datetime

    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        if name.startswith(("timm", "transformers", "peft")):
            torchvision_without_its_extension()
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=datetime.timedelta(seconds=40)
        )
        torch.manual_seed(0)
        right, right_rates = trained(name, False, rank)
        mine, rates = trained(name, True, rank)
        error = max((mine[n] - right[n]).abs().max().item() for n in right)
        moved = rates == right_rates
        told = "exact" if error < 2e-6 and moved else f"NOT EXACT: off by {error:.1e}"
        pipe.send(told if moved else f"{told}; learning rates {rates} instead of {right_rates}")
    except BaseException as raised:  # noqa: BLE001
        last = traceback.extract_tb(raised.__traceback__)[-1]
        pipe.send(f"{type(raised).__name__}: {str(raised)[:160]} ({os.path.basename(last.filename)}:{last.lineno})")
    os._exit(0)


def tried(name: str) -> str:
    context = multiprocessing.get_context("spawn")
    store = os.path.join(tempfile.mkdtemp(), "store")
    pipes, processes = [], []
    for rank in range(SIZE):
        here, there = context.Pipe()
        processes.append(context.Process(target=on_rank, args=(rank, name, store, there), daemon=True))
        processes[-1].start()
        pipes.append(here)
    told = []
    for pipe in pipes:
        try:
            told.append(pipe.recv() if pipe.poll(100) else "HANG")
        except EOFError:
            told.append("the process ended")
    for process in processes:
        process.kill()
    return told[0] if len(set(told)) == 1 else " | ".join(told)


def main() -> None:
    import importlib.metadata as metadata

    names = [n for n in KINDS if not sys.argv[1:] or any(a.lower() in n.lower() for a in sys.argv[1:])]
    packages = ("torch", "transformers", "peft", "timm", "accelerate", "lightning-fabric")
    print(", ".join(f"{p} {metadata.version(p)}" for p in packages))
    print(f"{SIZE} ranks, {WINDOWS} windows of {STEPS} micro-batches\n")
    for name in names:
        print(f"| {name} | {tried(name)} |", flush=True)


if __name__ == "__main__":
    main()
