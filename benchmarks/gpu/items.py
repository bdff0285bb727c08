"""Every item, in the order of its value: when time runs out, what matters most has been measured.

Short names of sources: `wants.md`, `peers.md`, `counters.md` and `spikes.md` are notes on published
figures kept beside the project; a name with # is an issue or pull request of that repository.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bench import Expect, Item

OWN = "haiprof's own promise (README)"
GOAL = "goal of the GPU proof: at most 1 % at default settings"
BITS = "haiprof's own promise: the same losses to the bit"
STATUS = "haiprof's own promise: the same exit status"
RULE = "examples and thresholds.py: what the rule was written for"


def must(figure: str, words: str, *, source: str, **more: Any) -> Expect:
    """A promise of haiprof's, whatever the hardware."""
    return Expect(figure=figure, words=words, source=source, kind="must", **more)


def goal(figure: str, words: str, *, source: str, **more: Any) -> Expect:
    """A promise of haiprof's on times and causes: only a GPU keeps or breaks it."""
    return Expect(figure=figure, words=words, source=source, kind="goal", **more)


def published(figure: str, words: str, *, source: str, **more: Any) -> Expect:
    """Somebody else's figure; another one is no failure."""
    return Expect(figure=figure, words=words, source=source, kind="published", **more)


def _state(figure: str = "window_state", words: str = "the trace window") -> Expect:
    return must(figure, words, equals="recorded", source=OWN)


def _status(value: int = 0) -> Expect:
    return must("exit_status", "exit status", equals=value, source=STATUS)


def _fires(rule: str) -> Expect:
    return goal(rule, f"finding {rule}", equals=True, source=RULE)


def _cost(profiler_source: str, high: float) -> tuple[Expect, ...]:
    return (
        goal(
            "again_ratio",
            "bare against bare: the noise",
            low=0.99,
            high=1.01,
            source="own choice: a cost of 1 % must be seen",
        ),
        goal("default_ratio", "recorded at default settings against bare", high=1.01, source=GOAL),
        published("bare_us", "a bare step", unit="us", low=0.0, source="for scale"),
        published(
            "default_added_us",
            "recording adds to a step",
            unit="us",
            high=75.0,
            source="spikes.md A1: 10 to 30 us on the host, and about 16 timed events of 2.5 us",
        ),
        published(
            "profiler_ratio", "torch.profiler against bare", high=high, source=profiler_source
        ),
        published(
            "window_ratio",
            "inside haiprof's window against bare",
            high=high,
            source=profiler_source,
        ),
        goal(
            "window_against_profiler_ratio",
            "window against torch.profiler",
            high=1.05,
            source="README: x0.95 to x0.99 without a GPU",
        ),
    )


def _left_behind(source: str, high: float) -> tuple[Expect, ...]:
    return (
        _state(),
        published("before_us", "a step before the window", unit="us", low=0.0, source="for scale"),
        goal(
            "after_ratio", "500 steps after a window against 500 before", high=high, source=source
        ),
    )


def _overlap(source: str) -> tuple[Expect, ...]:
    return (
        published(
            "bare_ratio",
            "two streams against one, without our events: 1 is all side by side, 2 none",
            high=2.2,
            source=source,
        ),
        published("recorded_ratio", "the same with our events", high=2.2, source=source),
        goal(
            "recorded_against_bare_ratio",
            "with our events against without",
            high=1.1,
            source=f"{source}; own choice of the limit",
        ),
    )


ITEMS = (
    Item(
        name="overhead-launch-bound",
        question="What does recording cost where every us on the host is a us of the step?",
        function="benchmarks.gpu.overhead:launch_bound",
        limit_s=60,
        expects=_cost("torch-xpu-ops#1784: up to +95 % on launch-bound decoding", 1.95),
    ),
    Item(
        name="overhead-product-bound",
        question="What does it cost where the host is ahead of the GPU?",
        function="benchmarks.gpu.overhead:product_bound",
        limit_s=60,
        expects=_cost("the host is ahead: what it does is hidden", 1.05),
    ),
    Item(
        name="first-kernels",
        question="Are the first 100 kernels of a window there, after our rehearsal of one step?",
        function="benchmarks.gpu.truth:first_kernels",
        limit_s=40,
        expects=(
            _state(),
            must(
                "steps_with_kernels",
                "steps of four with kernels",
                equals=4,
                source=(
                    "tokenspeed#1348: an empty first session left no kernels at all (CUDA 13.0); "
                    "peers.md 5.7: the first step is distorted without a warm-up"
                ),
            ),
            must(
                "first_100_present_ratio",
                "of the first 100 launches, with their kernel",
                low=0.99,
                source="pytorch#192021: kernels dropped",
            ),
            must(
                "first_step_ratio",
                "kernels of the first step against the others",
                low=0.99,
                high=1.01,
                source=OWN,
            ),
        ),
    ),
    Item(
        name="device-time",
        question="Is the device time of a phase the one that CUPTI sees?",
        function="benchmarks.gpu.truth:device_time",
        limit_s=40,
        expects=(
            must("spans", "spans compared", low=12, source="own choice"),
            goal(
                "median_difference_ratio",
                "median difference, spans of 1 ms and more",
                high=0.01,
                source="goal: 1 %; nvbench#184: 10 to 30 us of jitter",
            ),
            published(
                "largest_difference_us",
                "largest difference",
                unit="us",
                high=100,
                source="nvbench#184: 10 to 30 us of jitter",
            ),
        ),
    ),
    Item(
        name="event-cost",
        question="What do event records and queries cost, and our pool of them?",
        function="benchmarks.gpu.overhead:events",
        limit_s=30,
        expects=(
            published(
                "timed_record_us",
                "record of a timed event",
                unit="us",
                high=5,
                source="wants.md: about 2.5 us",
            ),
            published(
                "untimed_record_us",
                "record of an untimed one",
                unit="us",
                high=5,
                source="wants.md: about a tenth (V100)",
            ),
            published(
                "query_us",
                "query",
                unit="us",
                high=5,
                source="own estimate: a call into the driver without a submission",
            ),
            goal(
                "pool_step_us",
                "device timer, four spans of a step",
                unit="us",
                high=60,
                source="nine records of about 2.5 us (wants.md), and Python's part",
            ),
        ),
    ),
    Item(
        name="parity",
        question="DDP, FSDP2, checkpointing, mixed precision: same losses, whole steps?",
        function="benchmarks.gpu.training:parity",
        limit_s=120,
        expects=(
            must("exit_statuses_equal", "both exit with 0", equals=True, source=STATUS),
            must("ways_that_ran", "ways of training that ran", equals=5, source="the job itself"),
            must("differing_losses", "ways whose losses differ in a bit", equals=0, source=BITS),
            must(
                "forwards_invented",
                "forwards recorded, beyond those that were",
                equals=0,
                source="peers.md 5.2: a recomputed forward looks like one",
            ),
            must(
                "optimizer_spans_invented",
                "optimizer spans, beyond steps and calls of the scaler",
                equals=0,
                source="peers.md 5.3: a skipped step is none",
            ),
            must(
                "steps_beyond_those_taken",
                (
                    "steps recorded, beyond those taken; where one training follows another, two "
                    "may be one"
                ),
                low=-5,
                high=0,
                source="peers.md 5.3",
            ),
            must("traces", "traces", equals=1, source=OWN),
            goal(
                "fresh_process_ratio",
                "a step in a fresh process under haiprof against bare",
                high=1.03,
                source=GOAL + "; two processes differ by 2 %",
            ),
        ),
    ),
    Item(
        name="finding-launch-bound",
        question="Does the verdict name kernels that are too short?",
        function="benchmarks.gpu.findings:launch_bound",
        limit_s=45,
        expects=(_status(), _fires("launch_bound"), _fires("small_batches")),
    ),
    Item(
        name="finding-waits",
        question="Does it name .item() in every step, and copies from pageable memory?",
        function="benchmarks.gpu.findings:waits_and_copies",
        limit_s=45,
        expects=(_status(), _fires("synchronising_calls"), _fires("pageable_copies")),
    ),
    Item(
        name="finding-fp32",
        question="Does it name products that leave the tensor cores unused?",
        function="benchmarks.gpu.findings:full_precision",
        limit_s=45,
        expects=(_status(), _fires("tensor_cores_unused")),
    ),
    Item(
        name="healthy",
        question="TF32 products: is nothing named; is the first start of CUPTI no slow step?",
        function="benchmarks.gpu.findings:healthy",
        limit_s=60,
        expects=(
            goal("tensor_cores_named", "tensor cores named as unused", equals=False, source=RULE),
            goal(
                "slow_step_blamed",
                "findings about slow steps",
                equals="none",
                source="own promise: traced steps are kept out of medians",
            ),
            goal(
                "reactions",
                "reactions to slow or missing steps",
                equals=0,
                source="own promise: our own stall is not the job's",
            ),
            _state(),
            published(
                "window_stall_s",
                "stall of the window, CUPTI's first start in it",
                unit="s",
                high=30,
                source="kineto#542: 5 s and more",
            ),
        ),
    ),
    Item(
        name="finding-left-on-cpu",
        question="The published case: operators left on the CPU?",
        function="benchmarks.gpu.findings:left_on_cpu",
        limit_s=60,
        expects=(
            _status(),
            _fires("forward_bound"),
            goal(
                "headline_names_it",
                "the headline says so",
                equals=True,
                source="the published case (seed 002)",
            ),
        ),
    ),
    Item(
        name="finding-loader",
        question="Does it name a loader that is slower than the GPU?",
        function="benchmarks.gpu.findings:loader_bound",
        limit_s=45,
        expects=(_status(), _fires("dataloader_bound")),
    ),
    Item(
        name="after-window",
        question="Does a window leave anything behind that slows the job down?",
        function="benchmarks.gpu.overhead:after_window",
        limit_s=45,
        expects=_left_behind("pytorch#144455: 10 to 20 % slower after a window; goal: none", 1.02),
    ),
    Item(
        name="after-window-teardown",
        question="The same with TEARDOWN_CUPTI=1?",
        function="benchmarks.gpu.overhead:after_window",
        limit_s=45,
        environment={"TEARDOWN_CUPTI": "1"},
        expects=_left_behind("pytorch#144455, pytorch#151124: gone with TEARDOWN_CUPTI=1", 1.02),
    ),
    Item(
        name="nvml-prices",
        question="What does each NVML call take, idle and under load?",
        function="benchmarks.gpu.driver:prices",
        limit_s=60,
        expects=(
            published(
                "utilization_us",
                "UtilizationRates",
                unit="us",
                high=50,
                source="MangoHud#2104: 2.5 us",
            ),
            published(
                "memory_us", "MemoryInfo", unit="us", high=100, source="MangoHud#2104: 11.6 us"
            ),
            published(
                "processes_us",
                "list of processes",
                unit="us",
                high=10000,
                source="MangoHud#2104: 4.5 ms",
            ),
            goal(
                "sample_us",
                "a whole sample of haiprof's, median",
                unit="us",
                high=5000,
                source="agent/samplers/nvml.py: 5 ms, the driver's lock is held",
            ),
            goal(
                "sample_p99_us",
                "the longest of 30",
                unit="us",
                high=10000,
                source="counters.md 2: p99 of 5 ms, then it backs off",
            ),
        ),
    ),
    Item(
        name="nvidia-smi",
        question="Are clocks, power, memory, PCIe, throttle reasons those of nvidia-smi?",
        function="benchmarks.gpu.counters:beside_smi",
        limit_s=60,
        expects=(
            must("compared", "figures compared, idle and loaded", low=20, source="own choice"),
            must(
                "differing", "figures that differ", equals=0, source="nvidia-smi in the same second"
            ),
        ),
    ),
    Item(
        name="gpm",
        question="What does GPM show of a matrix product, and to whom?",
        function="benchmarks.gpu.gpm:gpm",
        limit_s=45,
        expects=(
            must(
                "users_asked",
                "users asked",
                low=1,
                source="counters.md 2.3: not documented who may read GPM",
            ),
            goal(
                "sm_active_ratio",
                "SMs active under products",
                low=0.8,
                high=1.02,
                source="a product of 4096 fills 132 SMs",
            ),
            goal(
                "tensor_active_ratio",
                "tensor cores active",
                low=0.3,
                high=1.02,
                source="KINDS.md: products at 788 of 989 TFLOP/s; the loop has more than them",
            ),
            goal(
                "dram_active_ratio",
                "DRAM active",
                low=0.0,
                high=0.8,
                source="products of 4096 are bound by arithmetic",
            ),
        ),
    ),
    Item(
        name="mig",
        question="Is a GPU that is cut into instances refused in words?",
        function="benchmarks.gpu.gpm:mig",
        limit_s=20,
        expects=(
            must(
                "refused_in_words",
                "the reason names MIG",
                equals=True,
                source="NVML documentation: no utilisation under MIG",
            ),
        ),
    ),
    Item(
        name="energy-and-throttling",
        question="Does energy grow by the power, and no throttle time by more than the time?",
        function="benchmarks.gpu.counters:energy",
        limit_s=40,
        expects=(
            goal(
                "energy_by_power_ratio",
                "energy over time and power",
                low=0.85,
                high=1.15,
                source="both are the driver's own",
            ),
            goal(
                "largest_throttle_ratio",
                "most throttled share of the time",
                low=0.0,
                high=1.1,
                source="a share of the time",
            ),
        ),
    ),
    Item(
        name="copied-bytes",
        question="Are the PCIe bytes those that were copied?",
        function="benchmarks.gpu.counters:copied_bytes",
        limit_s=40,
        expects=(
            goal(
                "received_ratio",
                "PCIe bytes received, of those copied",
                low=0.95,
                high=1.35,
                source="12 GiB copied, and the protocol's own bytes",
            ),
            published(
                "nvlink_received_bytes",
                "NVLink bytes meanwhile",
                unit="bytes",
                low=0,
                source="one GPU: none",
            ),
        ),
    ),
    Item(
        name="graph-capture",
        question="Can a CUDA graph be captured and replayed while haiprof records?",
        function="benchmarks.gpu.graphs:capture",
        limit_s=40,
        expects=(
            must("same_losses", "losses the same to the bit", equals=True, source=BITS),
            must(
                "hook_errors",
                "errors of the hook",
                equals=0,
                source="pytorch#104487, #75504: what an event breaks in a capture",
            ),
            must("device_records", "records of device time", low=1, source=OWN),
            must(
                "impossible_times",
                "times that cannot be",
                equals=0,
                source="own promise: never a wrong number",
            ),
        ),
    ),
    Item(
        name="graph-window-after-capture",
        question="Are the kernels of replays in a window, if the capture came first?",
        function="benchmarks.gpu.graphs:window_after_capture",
        limit_s=40,
        expects=(
            _state(),
            goal(
                "replayed_steps_with_kernels",
                "replayed steps of three with their kernels",
                equals=3,
                source="kineto#1165: wrong before CUDA 13.1",
            ),
            must("graph_launches", "cudaGraphLaunch calls", low=3, source="one per replay"),
        ),
    ),
    Item(
        name="graph-window-before-capture",
        question="And if a window came before the capture?",
        function="benchmarks.gpu.graphs:window_before_capture",
        limit_s=40,
        expects=(
            _state("first_window_state", "the window before the capture"),
            _state(),
            goal(
                "replayed_steps_with_kernels",
                "replayed steps of three with their kernels",
                equals=3,
                source="pytorch#101879, #112507: crashes when CUPTI came back",
            ),
            must("graph_launches", "cudaGraphLaunch calls", low=3, source="one per replay"),
        ),
    ),
    Item(
        name="reduce-overhead",
        question="torch.compile(mode='reduce-overhead') with haiprof and a window?",
        function="benchmarks.gpu.graphs:reduce_overhead",
        limit_s=90,
        expects=(
            must("same_losses", "losses the same to the bit", equals=True, source=BITS),
            _state(),
            must("hook_errors", "errors of the hook", equals=0, source=OWN),
            goal(
                "steps_with_kernels",
                "steps of two with kernels",
                equals=2,
                source="pytorch#101848: Inductor turns CUPTI's re-init off",
            ),
        ),
    ),
    Item(
        name="overlap",
        question="Do our events keep two streams from running side by side?",
        function="benchmarks.gpu.truth:overlap",
        limit_s=30,
        expects=_overlap("CUDA programming guide: streams run side by side"),
    ),
    Item(
        name="overlap-one-connection",
        question="And with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron sets it?",
        function="benchmarks.gpu.truth:overlap",
        limit_s=30,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        expects=_overlap("pytorch#143890: overlap lost with timed events"),
    ),
    Item(
        name="utilisation",
        question="FLOP/s of a product and of a transformer's step, by torch's own counter?",
        function="benchmarks.gpu.findings:utilisation",
        limit_s=45,
        expects=(
            must(
                "counted_by_formula_ratio",
                "FLOPs counted against 2·n³",
                low=0.999,
                high=1.001,
                source="torch.utils.flop_counter",
            ),
            published(
                "product_tflops",
                "a product of 8192 in bf16",
                unit="TFLOP/s",
                low=700,
                high=850,
                source="KINDS.md: 769 to 798 on random data",
            ),
            published(
                "product_mfu_ratio",
                "of the datasheet's 989 TFLOP/s",
                low=0.7,
                high=0.9,
                source="KINDS.md over the H200's datasheet",
            ),
            must(
                "step_flops",
                "FLOPs of a transformer's step",
                unit="FLOP",
                low=1,
                source="torch.utils.flop_counter",
            ),
            published(
                "step_mfu_ratio",
                "its MFU",
                low=0.05,
                high=0.8,
                source="PaLM (arXiv 2204.02311): 46 %; eager autocast reaches less",
            ),
        ),
    ),
    Item(
        name="memory-history",
        question="What does the allocator's history cost, and a snapshot of it?",
        function="benchmarks.gpu.memory:history",
        limit_s=60,
        expects=(
            published(
                "added_us_1k",
                "added to an allocation, 1,000 entries",
                unit="us",
                high=6,
                source="wants.md: 1.5 to 2 us",
            ),
            published(
                "snapshot_1k_ms",
                "snapshot at 1,000 entries",
                unit="ms",
                high=20,
                source="wants.md: 4.2 ms",
            ),
            published(
                "added_us_100k",
                "added to an allocation, 100,000 entries",
                unit="us",
                high=6,
                source="wants.md: 1.5 to 2 us",
            ),
            published(
                "snapshot_100k_ms",
                "snapshot at 100,000 entries",
                unit="ms",
                high=2000,
                source="wants.md: 727 ms",
            ),
            must(
                "entries_kept",
                "the snapshot has entries",
                equals=True,
                source="torch.cuda.memory._record_memory_history",
            ),
            must(
                "read_without_executing",
                "haiprof reads from the file what torch told",
                equals=True,
                source="torch.cuda.memory._snapshot",
            ),
        ),
    ),
    Item(
        name="out-of-memory",
        question="A job that runs out of memory: does it end as without haiprof, and why?",
        function="benchmarks.gpu.memory:out_of_memory",
        limit_s=45,
        expects=(
            _status(1),
            must("traceback_is_torchs_own", "the traceback is torch's", equals=True, source=STATUS),
            must("steps_recorded", "its steps are recorded", equals=True, source=OWN),
            must(
                "explained",
                "the verdict names it",
                equals=True,
                source="wants.md 3: OOM autopsy without code",
            ),
            must(
                "counted",
                "asked for, limit, allocated, reserved, largest free piece are known",
                equals=True,
                source="torch._C._cuda_attach_out_of_memory_observer, memory_stats",
            ),
            must(
                "named_by_line",
                "the lines of the job that hold memory are named",
                equals=True,
                source="the snapshot, with --memory-history on",
            ),
        ),
    ),
    Item(
        name="flight-recorder",
        question="NCCL's Flight Recorder: on by default, and what does a dump cost?",
        function="benchmarks.gpu.training:flight_recorder",
        limit_s=40,
        expects=(
            published(
                "entries_by_default",
                "entries after 2,200 collectives",
                low=1,
                source="torch 2.9 on: TORCH_FR_BUFFER_SIZE 2,000; before: off",
            ),
            published(
                "dump_ms",
                "dump of them",
                unit="ms",
                high=60,
                source="wants.md: 17 ms at 2,000 entries (gloo)",
            ),
            goal(
                "status_us",
                "status alone, read once a second",
                unit="us",
                high=500,
                source="in_job/collectives.py: some microseconds",
            ),
        ),
    ),
    Item(
        name="conflict-own-profiler",
        question="The job's own profiler, warm-up too: does it lose anything to us?",
        function="benchmarks.gpu.conflicts:own_profiler",
        limit_s=40,
        expects=(
            _status(),
            must(
                "own_kernels",
                "kernels in the job's own trace",
                low=1,
                source="spikes.md E3: a crash in its warm-up, an empty trace",
            ),
            must(
                "our_window",
                "our window gives way",
                equals="refused",
                source="own promise: the job's profiler wins",
            ),
        ),
    ),
    Item(
        name="conflict-kineto-daemon",
        question="KINETO_USE_DAEMON: does the job run as ever?",
        function="benchmarks.gpu.conflicts:kineto_daemon",
        limit_s=40,
        expects=(
            _status(),
            must(
                "our_window",
                "our window",
                equals="refused",
                source="in_job/windows/user_profilers.py",
            ),
            must(
                "reason_names_it",
                "its reason names the variable",
                equals=True,
                source="in_job/windows/user_profilers.py",
            ),
        ),
    ),
    Item(
        name="conflict-nsys",
        question="A job that nsys records: does it run as ever?",
        function="benchmarks.gpu.conflicts:nsys_records",
        limit_s=50,
        expects=(
            _status(),
            must(
                "our_window",
                "our window gives way",
                equals="refused",
                source="pytorch#117935, TensorRT-LLM#9073: CUPTI has one subscriber",
            ),
        ),
    ),
    Item(
        name="nvml-beside-job",
        question="Does sampling slow a job's steps or allocations down?",
        function="benchmarks.gpu.driver:beside_a_job",
        limit_s=60,
        expects=(
            goal("step_ratio_1hz", "step at one sample a second", high=1.01, source=GOAL),
            published(
                "step_ratio_10hz",
                "step at ten",
                high=1.05,
                source="MangoHud#2104: 40 Hz stalled other threads",
            ),
            goal(
                "malloc_ratio_1hz",
                "cudaMalloc and cudaFree at one",
                high=1.05,
                source="MangoHud#2104: the driver's one lock",
            ),
            published(
                "malloc_ratio_10hz",
                "the same at ten",
                high=1.5,
                source="MangoHud#2104: the driver's one lock",
            ),
        ),
    ),
    Item(
        name="burst",
        question="Counters each 100 us for some seconds: do they come, or is it said why not?",
        function="benchmarks.gpu.conflicts:burst",
        limit_s=90,
        expects=(
            _status(),
            must("told", "what became of it is told", equals=True, source=OWN),
            goal(
                "samples_per_s",
                "samples per second",
                unit="/s",
                low=9000,
                high=11000,
                source="nsys user guide: 10 kHz",
            ),
        ),
    ),
    Item(
        name="pm-sampling",
        question="CUPTI's PM sampling from outside, GPM beside torch.profiler: who fails?",
        function="benchmarks.gpu.conflicts:pm_sampling",
        limit_s=70,
        expects=(
            published(
                "status",
                "exit status of the sampling",
                equals=0,
                source="counters.md 3: cupti-python, needs the right to counters",
            ),
            goal(
                "gpm_beside_profiler",
                "GPM answers beside torch.profiler",
                equals=True,
                source="counters.md 11, question 6",
            ),
        ),
    ),
    Item(
        name="nvml-answers",
        question="Rings of samples, ids of this driver, fork, process ids?",
        function="benchmarks.gpu.answers:answers",
        limit_s=45,
        expects=(
            must(
                "answered",
                "questions answered",
                low=7,
                source="counters.md 11: what NVML's documentation leaves open",
            ),
        ),
    ),
)
