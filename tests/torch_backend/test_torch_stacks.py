"""Training stacks on the CPU: on pynccl each gives gloo's losses, and only the backend's name changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from pynccl import testing

# Each rank imports torch and a stack.
pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.usefixtures("torch_backend"),
    pytest.mark.timeout(600),
]

CPU = torch.device("cpu")
STEPS = 6
Losses = list[float]
Program = Callable[..., Losses]


# --- a job under torchrun's variables ---


def run_job(nranks: int, backend: str, program: Program, *args: Any) -> list[Losses]:
    """Run a program on each rank; it begins the process group, or its stack does."""
    # As torchrun's agent has it: no rank opens a port that another program may have taken meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    task = (backend, store.port, program, args)
    # DeepSpeed looks for the compiler of CUDA otherwise.
    env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return testing.run(nranks, under_torchrun, *task, backend="cpu", timeout=250, env=env)


def under_torchrun(
    rank: int, size: int, backend: str, port: int, program: Program, args: tuple[Any, ...]
) -> Losses:
    import pynccl.torch  # noqa: F401

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "stacks",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.manual_seed(0)
    losses = program(backend, *args)
    if program is not by_torchft:
        # The stack has not chosen another one for a group of its own.
        used = {str(name) for name, _ in dist.distributed_c10d._world.pg_map.values()}
        # By this name torchtitan itself makes groups of one rank, and others in which nothing is sent.
        assert used - {"fake"} == {backend}, used
        dist.destroy_process_group()
    return losses


def same_losses(nranks: int, program: Program, *args: Any) -> list[Losses]:
    """Compare the losses of all ranks on pynccl with those on gloo, and return them."""
    theirs, ours = (run_job(nranks, backend, program, *args) for backend in ("gloo", "pynccl"))
    assert all(losses for losses in ours)
    for rank in range(nranks):
        assert ours[rank] == pytest.approx(theirs[rank], abs=1e-6), (rank, ours, theirs)
    return ours


# --- what they train ---


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part of the samples of a step: all parts together are the same for any number of them."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step + 1))
    return x.chunk(parts)[part], x.cumsum(1).tanh().chunk(parts)[part]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of all steps, one after another."""
    x, y = zip(*(batch(step) for step in range(STEPS)), strict=True)
    return torch.cat(x), torch.cat(y)


def in_one_process(steps: int = STEPS, count: int = 4) -> Losses:
    model = nn.Sequential(*blocks(count))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return [train_step(model, optimizer, *batch(step)) for step in range(steps)]


def train_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def mean(loss: float) -> float:
    """Return the mean over the ranks, which is the loss over all their samples."""
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# --- torch.distributed.pipelining ---


def pipelined(backend: str, schedule: str, per_rank: int) -> Losses:
    from torch.distributed import pipelining

    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    count = size * per_rank
    places = range(rank, count, size)
    parts = blocks(count)
    stages = [pipelining.PipelineStage(parts[place], place, count, CPU) for place in places]
    kind = getattr(pipelining, schedule)
    # The loss of a micro-batch is a mean, and the gradients are scaled by their number.
    whole = kind(stages if per_rank > 1 else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam([p for place in places for p in parts[place].parameters()], lr=0.01)
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        last = {"target": y, "losses": losses} if places[-1] == count - 1 else {}
        whole.step(*([x] if rank == 0 else []), **last)
        optimizer.step()
        # Only the last stage knows it.
        found.append(mean(float(torch.stack(losses).mean()) * size if losses else 0.0))
    return found


@pytest.mark.parametrize(
    ("nranks", "schedule", "per_rank"),
    [
        (2, "ScheduleGPipe", 1),
        (4, "Schedule1F1B", 1),
        (2, "ScheduleInterleaved1F1B", 2),
        (2, "ScheduleInterleavedZeroBubble", 2),
    ],
)
def test_pipeline_schedules(nranks: int, schedule: str, per_rank: int) -> None:
    for losses in same_losses(nranks, pipelined, schedule, per_rank):
        assert losses == pytest.approx(in_one_process(count=nranks * per_rank), abs=1e-5)


# --- torch.distributed.checkpoint ---


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*blocks(4))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def trained(model: nn.Module, optimizer: Any, steps: range) -> Losses:
    rank, size = dist.get_rank(), dist.get_world_size()
    return [mean(train_step(model, optimizer, *batch(step, rank, size))) for step in steps]


def saved(backend: str, folder: str, in_background: bool) -> Losses:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    dist.init_process_group(backend)
    model, optimizer = sharded()
    losses = trained(model, optimizer, range(STEPS // 2))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if in_background:
        pending = checkpoint.async_save(state, checkpoint_id=f"{folder}/{backend}")
        # Collectives of the checkpoint's thread and of the training are in flight together.
        pending.result()
    else:
        checkpoint.save(state, checkpoint_id=f"{folder}/{backend}")
    return losses


def resumed(backend: str, folder: str) -> Losses:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group(backend)
    model, optimizer = sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=f"{folder}/{backend}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return trained(model, optimizer, range(STEPS // 2, STEPS))


@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoints_on_another_number_of_ranks(tmp_path: Path, in_background: bool) -> None:
    """Four ranks save, two load and go on."""
    before = same_losses(4, saved, str(tmp_path), in_background)
    after = same_losses(2, resumed, str(tmp_path))
    for losses in (before[0] + after[0], before[-1] + after[-1]):
        assert losses == pytest.approx(in_one_process(), abs=1e-5)


# --- DeepSpeed ---


def deepspeed_zero(backend: str, stage: int) -> Losses:
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 16 // size,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "adam_w_mode": False}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=nn.Sequential(*blocks(4)), config=config)
    found = []
    for step in range(STEPS):
        x, y = batch(step, rank, size)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        found.append(mean(loss.item()))
    return found


@pytest.mark.parametrize(("nranks", "stage"), [(2, 1), (4, 2), (2, 3)])
def test_deepspeed(nranks: int, stage: int) -> None:
    for losses in same_losses(nranks, deepspeed_zero, stage):
        assert losses == pytest.approx(in_one_process(), abs=1e-5)


# --- accelerate ---


def accelerated(backend: str, folder: str) -> Losses:
    from accelerate import Accelerator

    # accelerate accepts the name of no other backend than gloo on CPUs, and takes the group that there is.
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), batch_size=4)
    model = nn.Sequential(*blocks(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    found = []

    def epoch() -> None:
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(float(accelerator.gather_for_metrics(loss.detach()[None]).mean()))

    accelerator.save_state(f"{folder}/{backend}")
    epoch()
    first = list(found)
    accelerator.load_state(f"{folder}/{backend}")
    epoch()
    assert found == first * 2
    return first


def test_accelerate(tmp_path: Path) -> None:
    same_losses(2, accelerated, str(tmp_path))


# --- transformers ---


def by_the_trainer(backend: str, folder: str) -> Losses:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    dist.init_process_group(backend)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    texts = torch.randint(64, (48, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    arguments = TrainingArguments(
        f"{folder}/{backend}",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    return [
        entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry
    ]


def test_transformers_trainer(tmp_path: Path) -> None:
    for losses in same_losses(2, by_the_trainer, str(tmp_path)):
        assert losses[-1] < losses[0]


# --- the names that accelerate and the Trainer accept ---


def refused_by_name(backend: str, folder: str) -> Losses:
    """As docs/torch.md has it: on CPUs gloo only, unless there is a group; on CUDA devices any name."""
    from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
    from transformers import TrainingArguments

    def accelerator(**named: str) -> Any:
        handlers = [InitProcessGroupKwargs(**named)] if named else []
        return Accelerator(cpu=True, kwargs_handlers=handlers).state

    def trainer(**named: str) -> Any:
        options: dict[str, Any] = {f"ddp_{name}": value for name, value in named.items()}
        arguments = TrainingArguments(folder, use_cpu=True, **options)
        # It asks accelerate when it is asked for its device.
        assert arguments.device.type == "cpu"
        return arguments.distributed_state

    for made in (accelerator, trainer):
        with pytest.raises(
            ValueError, match=f"Your assigned backend {backend} is not available, please use gloo"
        ):
            made(backend=backend)
        PartialState._reset_state()
        assert not dist.is_initialized()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        chosen, kind = PartialState._prepare_backend(PartialState, False, False, backend)
        assert (chosen, kind.value) == (backend, "MULTI_GPU")
    dist.init_process_group(backend)
    for made in (accelerator, trainer):
        state = made()
        assert (state.num_processes, state.process_index) == (dist.get_world_size(), dist.get_rank())
        PartialState._reset_state()
    return [mean(1.0)]


def test_names_that_accelerate_and_the_trainer_accept(tmp_path: Path) -> None:
    assert run_job(2, "pynccl", refused_by_name, str(tmp_path)) == [[1.0]] * 2


# --- Lightning ---


def by_lightning(backend: str, folder: str) -> Losses:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*blocks(4))
            self.found: Losses = []

        def training_step(self, samples: list[torch.Tensor], _: int) -> torch.Tensor:
            x, y = samples
            loss = nn.functional.mse_loss(self.model(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.found.append(float(self.trainer.callback_metrics["loss"]))

        def validation_step(self, samples: list[torch.Tensor], _: int) -> None:
            x, y = samples
            self.log("checked", nn.functional.mse_loss(self.model(x), y), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    whole = torch.utils.data.TensorDataset(*samples())
    # A rank takes every size-th sample: the batch of a step, of all ranks, is that of one process.
    mine = torch.utils.data.DistributedSampler(whole, size, rank, shuffle=False)
    data = torch.utils.data.DataLoader(whole, batch_size=16 // size, sampler=mine)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        use_distributed_sampler=False,
        default_root_dir=f"{folder}/{backend}",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, data, data)
    return [*model.found, float(trainer.callback_metrics["checked"])]


def test_lightning(tmp_path: Path) -> None:
    for losses in same_losses(2, by_lightning, str(tmp_path)):
        assert losses[:-1] == pytest.approx(in_one_process(), abs=1e-5)


# --- Megatron-core ---


class CudaIsTheCpu(TorchFunctionMode):
    """What asks for a CUDA device by a `device` argument gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        return func(*args, **kwargs)


def stand_in_for_cuda() -> None:
    """Megatron-core knows no other devices; these are all that it asks of them here."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    stand_ins: Any = torch.cuda
    stand_ins.current_device = lambda: CPU
    stand_ins.synchronize = lambda *_: None
    # Of a generator that only dropout uses.
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()


def by_megatron(backend: str, tensor: int, stages: int) -> Losses:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    stand_in_for_cuda()
    dist.init_process_group(backend)
    parallel_state.initialize_model_parallel(tensor, stages, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    last = parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=last,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    in_micro_batches = get_forward_backward_func()
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with CudaIsTheCpu():
            losses = in_micro_batches(
                forward_step_func=megatron_forward,
                data_iterator=iter(counting(step)),
                model=model,
                num_microbatches=4,
                seq_length=8,
                micro_batch_size=2,
                forward_only=False,
            )
        optimizer.step()
        # Each rank of the last stage has it.
        found.append(mean(float(torch.stack(losses).mean()) * stages if last else 0.0))
    return found


def counting(step: int) -> list[torch.Tensor]:
    """Return the micro-batches of a step: texts in which each token is the one before, and one more."""
    generator = torch.Generator().manual_seed(step)
    return [(torch.randint(32, (2, 1), generator=generator) + torch.arange(8)) % 32 for _ in range(4)]


def megatron_forward(data: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    masked = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]
    losses = model(tokens, torch.arange(8).expand(2, 8), masked, labels=tokens.roll(-1, 1))

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Megatron divides the first in place.
        return losses.mean(), losses.detach().mean()

    return losses, loss


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_megatron(tensor: int, stages: int) -> None:
    found = same_losses(tensor * stages, by_megatron, tensor, stages)
    if stages == 1:
        # The weights of a stage depend on the layers before it on its rank.
        (alone,) = run_job(1, "gloo", by_megatron, 1, 1)
        assert found[0] == pytest.approx(alone, abs=1e-5)
    assert all(losses == found[0] and losses[-1] < losses[0] for losses in found)


# --- torchtitan ---


def titan_on_the_cpu(backend: str) -> None:
    """torchtitan takes the first accelerator, else CUDA; it has no setting for a device or a backend.

    It takes the backend that torch has for the device, in a map that an accelerator's package fills.
    """
    dist.Backend.default_device_backend_map["cpu"] = backend
    # Of experts alone; it needs triton, which torch's CPU build does not bring.
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    from torchtitan.tools import utils

    memory = SimpleNamespace(total_memory=1 << 30)
    of_cuda = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: memory,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    for name, function in of_cuda.items():
        setattr(torch.cpu, name, function)
    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.distributed import utils as of_groups

    # By dist.set_timeout, which torch 2.13 does not have yet.
    of_groups.set_pg_timeouts = lambda **_: None


def titan_parts() -> tuple[Any, Any]:
    """Return the configurations of a tokenizer and of a loader, for texts in which each token is one more."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    class Counting(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(
            self, config: Any, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any
        ) -> None:
            self.rank, self.shape = dp_rank, (local_batch_size, seq_len)

        def __iter__(self) -> Iterator[Any]:
            generator = torch.Generator().manual_seed(self.rank)
            positions = torch.arange(self.shape[1]).expand(self.shape).contiguous()
            while True:
                tokens = (torch.randint(64, (self.shape[0], 1), generator=generator) + positions) % 64
                yield {"input": tokens, "positions": positions}, (tokens + 1) % 64

        state_dict = load_state_dict = None

    return NoTokenizer.Config(), Counting.Config()


def by_torchtitan(backend: str, tensor: int, shards: int, folder: str) -> Losses:
    titan_on_the_cpu(backend)
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = titan_parts()
    config.training.steps, config.training.local_batch_size, config.training.seq_len = STEPS, 4, 16
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.tensor_parallel_degree = tensor
    config.parallelism.data_parallel_shard_degree = shards
    # The default needs a newer torch.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = config.comm.trace_buf_size = 0
    config.dump_folder = f"{folder}/{backend}"
    # FlexAttention has no backward on CPUs.
    for _, _, parent, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            # Else by ReduceOp.PREMUL_SUM, which gloo refuses.
            module.set_force_sum_reduction_for_comms(True)
    found: Losses = []
    trainer.metrics_processor.log = lambda _, loss, greatest, norm, *more, **named: found.extend([loss, norm])
    trainer.train()
    trainer.close()
    return found


@pytest.mark.parametrize(("tensor", "shards"), [(2, 1), (1, 2), (2, 2)])
def test_torchtitan(tensor: int, shards: int, tmp_path: Path) -> None:
    """The losses, and the norms of the gradients."""
    found = same_losses(tensor * shards, by_torchtitan, tensor, shards, str(tmp_path))
    assert all(each == found[0] and len(each) == 2 * STEPS and each[-2] < each[0] for each in found)


# --- torchft ---


def by_torchft(backend: str, lighthouse: str) -> Losses:
    from torch_torchft import ProcessGroupPynccl, start_manager
    from torchft import DistributedDataParallel, Optimizer
    from torchft.process_group import ProcessGroupGloo

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = nn.Sequential(*blocks(4))
    manager = start_manager(
        store,
        rank,
        pg={"gloo": ProcessGroupGloo, "pynccl": ProcessGroupPynccl}[backend](timeout=timedelta(seconds=30)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=size,
        lighthouse_addr=lighthouse,
        # They begin with the same weights: none fetches those of another instead of its first step.
        init_sync=False,
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.Adam(model.parameters(), lr=0.01))
    found = []
    for step in range(STEPS):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(x), y)
        loss.backward()
        average = loss.detach().clone()
        manager.allreduce(average).wait()
        optimizer.step()
        assert manager.errored() is None and manager.num_participants() == size
        found.append(average.item())
    manager.shutdown(wait=False)
    return found


def test_torchft() -> None:
    """Each rank is a replica of its own; `examples/torch_torchft.py` loses one."""
    from torchft.coordination import LighthouseServer

    found = {}
    for backend in ("gloo", "pynccl"):
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=30000)
        found[backend] = run_job(2, backend, by_torchft, lighthouse.address())
        lighthouse.shutdown()
    for rank in range(2):
        assert found["pynccl"][rank] == pytest.approx(found["gloo"][rank], abs=1e-6)
        assert found["gloo"][rank] == pytest.approx(in_one_process(), abs=1e-5)
