"""Instruments that hold Triton kernels to account on a machine without a GPU.

kvsan: a sanitizer on Triton's interpreter. aot: compile for GPUs and read what came out. recording: a
driver that compiles and records launches. cpu_driver: a driver that runs the compiled kernels natively on
the CPU. fakedev: an accelerator that sees every wait of the host and captures steps. They use private parts
of Triton (3.6.0 to 3.9.0 tried) and of torch, and may need mending when these change.
"""
