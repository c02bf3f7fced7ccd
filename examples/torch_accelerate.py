"""accelerate, or transformers' Trainer, on pynccl: the group is made first, and they use it.

torchrun --nproc-per-node 2 examples/torch_accelerate.py loop
torchrun --nproc-per-node 2 examples/torch_accelerate.py trainer
"""

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist

import pynccl.torch  # noqa: F401


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.linear(x)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}


def samples() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()[None]} for row in x]


def loop() -> float:
    from accelerate import Accelerator

    # On CUDA devices without cpu=True.
    accelerator = Accelerator(cpu=True)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(samples(), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    loss = torch.zeros(())
    for _ in range(5):
        for batch in data:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    everyone, mean = accelerator.gather(loss.detach()[None]), accelerator.reduce(loss.detach(), "mean")
    assert torch.isclose(everyone.mean(), mean)
    return float(mean)


def trainer() -> float:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        # Without ddp_backend; on CUDA devices without use_cpu=True.
        arguments = TrainingArguments(folder, use_cpu=True, num_train_epochs=5, learning_rate=0.1, **quiet)
        training = Trainer(Regression(), arguments, train_dataset=samples(), eval_dataset=samples())
        training.train()
        return float(training.evaluate()["eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["loop", "trainer"])
    parser.add_argument("--backend", default="pynccl")
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    loss = {"loop": loop, "trainer": trainer}[arguments.way]()
    where = f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}"
    sys.stdout.write(f"{where}: loss {loss:.6f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
