"""The comparison's run with Accelerate: `accelerate launch --cpu --num_processes 2 with_accelerate.py`."""

from itertools import count
from pathlib import Path

from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from shared import make_data, make_model, read_options, record
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader


def main():
    options = read_options()
    set_seed(1)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    print(accelerator.distributed_type)
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    data = DataLoader(make_data(), 8, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    done = 0
    if options.resume:
        accelerator.load_state("state")
        done = int(Path("state/done").read_text())
    for epoch in count(done // len(data)):
        batches = accelerator.skip_first_batches(data, done % len(data))
        batches.set_epoch(epoch)
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            record(loss)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == options.steps:
                accelerator.save_state("state")
                if accelerator.is_main_process:
                    Path("state/done").write_text(str(done))
                accelerator.end_training()
                return


if __name__ == "__main__":
    main()
