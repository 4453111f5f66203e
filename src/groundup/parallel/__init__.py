"""Many processes: one model trained by several GPUs, on one machine or many. Applied to a model from outside.

Read in this order:

    processes.py, launch.py             who is who, where they meet, how they are started and end
    agree.py                            what ranks must hold in common before the first collective
    ddp.py                              data parallelism four ways
    flat.py                             parameters side by side, cut into equal shards
    optimizer.py, zero.py, whole.py     optimizer state sharded: by elements (ZeRO-1), by parameters (also Muon)
    units.py, fsdp.py                   weights sharded as well
    torch_engines.py                    PyTorch's DDP and FSDP2 behind the same interface
    engine.py, state.py                 a configuration → an engine; its state as whole named tensors
"""
