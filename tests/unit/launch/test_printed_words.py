"""What lines of well-known training scripts tell, and what looks like it and tells nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.agent import process_ends
from haiprof.agent.process_ends import JobOutput, OutputFile, Stream, find_words, take_mark
from haiprof.run_analysis.printed_lines import Output, PrintedLine, printed_notes
from haiprof.run_format.reader import read_lines


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 120 loss nan", 120),
        ("{'loss': nan, 'grad_norm': nan, 'learning_rate': 4e-05, 'epoch': 0.1}", None),
        ("iter 500: loss inf, time 12.1ms, mfu 3.2%", 500),
        ("Epoch 3 [120/1000] train_loss=tensor(nan, grad_fn=<NllLossBackward0>)", None),
        ("Loss is nan, stopping training", None),
        (" 12%|#2        | 120/1000 [00:12<01:28, 9.9it/s, loss=nan]", 120),
        ('{"global_step": 7, "train/loss": NaN}', 7),
        ("global_step: 64 | lm loss: -Infinity |", 64),
        ("step=3 perplexity: inf", 3),
        ("after 10 min, step 9 loss: nan", 9),
    ],
)
def test_loss_that_is_no_finite_number_is_told_with_its_step(line: str, step: int | None) -> None:
    word = next(find_words(line))
    assert (word.kind, word.step, word.text) == ("loss", step, line.strip())


@pytest.mark.parametrize(
    "line",
    [
        "step 1 loss 2.31", "best val loss: inf", "min_loss = inf", "loss improved from inf to 2",
        "loss_scale: inf", "grad_norm: inf", "lossless: nanometre", "previous loss: nan",
        "EarlyStopping loss inf", "NaN", "loss", "nan loss_fn", "loss: info about it",
        "NCCL INFO Connected all rings", "3 errors", "10/100 [00:01<00:09]", "12.3MB/s",
        "eval_samples_per_second: 41.2", "Downloading: 12 it/s", "5 tokens", "0 steps/s",
        "Writing model shards: 100%|█| 1/1 [00:00<00:00, 232.17it/s]", "Map: 10 examples/s",
        "Evaluating: 9/9 [9it/s]",
    ],
)  # fmt: skip
def test_other_lines_tell_nothing(line: str) -> None:
    assert list(find_words(line)) == []


@pytest.mark.parametrize(
    ("line", "per_second", "unit"),
    [
        ("step 10 | 12,345 tokens/s", 12_345, "tokens"),
        ("12.5k tok/sec, loss 2.1", 12_500, "tokens"),
        ("step: 10  loss: 8.1  memory: 1.2GiB(4%)  tps: 5,432  mfu: 3.1%", 5432, "tokens"),
        ("{'train_runtime': 9.1, 'train_samples_per_second': 41.25}", 41.25, "samples"),
        ("throughput (samples/sec): 99", 99, "samples"),
        ("speed: 310.2 images/s", 310.2, "images"),
        ("900 tok/s | 3.2 GB", 900, "tokens"),
        (" 12%|#2        | 120/1000 [00:12<01:28,  9.9it/s]", 9.9, "steps"),
        (" 12%|#2        | 120/1000 [00:12<01:28,  4.00s/it]", 0.25, "steps"),
        ("2.5 sequences per second", 2.5, "sequences"),
    ],
)
def test_printed_rate_has_its_number_and_unit(line: str, per_second: float, unit: str) -> None:
    (word,) = find_words(line)
    assert (word.kind, word.per_second, word.unit) == ("rate", per_second, unit)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("node7:311:402 [1] NCCL WARN Call to connect returned Connection refused", "nccl"),
        ("torch.distributed.DistBackendError: NCCL error: ncclSystemError: ...", "nccl"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "memory"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "memory"),
    ],
)
def test_errors_of_nccl_and_memory_are_told(line: str, kind: str) -> None:
    assert [word.kind for word in find_words(line)] == [kind]


def test_traceback_is_told_by_its_last_line_and_place() -> None:
    stream = Stream()
    lines = [
        "Traceback (most recent call last):", '  File "/home/me/train.py", line 8, in read',
        "    raise ValueError(loss is nan)", "", "ValueError: bad record 7", "step 8 loss 2.0",
    ]  # fmt: skip
    (word,) = (word for line in lines for word in stream.read_line(line))
    assert (word.kind, word.text) == ("traceback", "ValueError: bad record 7 (train.py:8)")


@pytest.mark.parametrize(
    ("line", "rest", "rank", "process"),
    [
        ("[rank3]: KeyError: 1", "KeyError: 1", 3, None),
        ("[default3]:step 1", "step 1", None, None),  # of torchrun: a local rank
        ("n1:311:402 [1] NCCL WARN x", "n1:311:402 [1] NCCL WARN x", None, 311),
        ("step 1", "step 1", None, None),
    ],
)
def test_mark_of_a_line_says_whose_it_is(
    line: str, rest: str, rank: int | None, process: int | None
) -> None:
    assert take_mark(line) == (rest, rank, process)


BAR = "77%|#7  | {}/2000 [00:09<00:03, {}it/s]"


def test_last_rate_of_a_file_is_always_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon after the one before: it is what the job says of itself at its end."""
    printed, events = tmp_path / "out.txt", tmp_path / "events.jsonl"
    printed.write_text(f"{BAR.format(3, 29.4)}\r{BAR.format(1535, 132.9)}\n158.9 steps/s")
    file = OutputFile(str(printed), printed.stat().st_dev, printed.stat().st_ino, 0)
    monkeypatch.setattr(process_ends, "_open_file", lambda *_: file)
    output = JobOutput(events, lambda _: 0)
    output.find(100)
    output.start()
    output.close(9.0)
    rates = [line["per_second"] for line in read_lines(events)[0] if line["type"] == "printed"]
    assert rates == [29.4, 158.9]


@pytest.mark.parametrize(
    ("printed", "unit", "batch", "said"),
    [
        ({212.4: ""}, "samples", 16.0, ""),  # of 214.4, as measured
        ({424.0: ""}, "samples", 16.0, ""),  # of two ranks
        ({150.0: ""}, "samples", 16.0, "150 samples/s; its steps make 214.4 samples/s"),
        ({150.0: ""}, "samples", None, ""),
        ({13.0: ""}, "steps", None, ""),
        ({5.0: ""}, "steps", None, "5 steps/s; its steps make 13.4 steps/s"),
        ({1340.0: ""}, "tokens", 16.0, "13.4 steps/s, which is 100 tokens per step"),
        # At first it counts what comes before the steps; a pause may be before the last one.
        ({2.0: "", 13.0: ""}, "steps", None, ""),
        ({13.1: "", 13.0: "", 2.0: ""}, "steps", None, ""),
        ({6.0: "", 5.0: ""}, "steps", None, "5 steps/s (the last of 2)"),
        ({2.9: BAR.format(3, 2.9), 9.9: BAR.format(1535, 9.9)}, "steps", None, ""),
        ({9.9: BAR.format(2000, 9.9)}, "steps", None, "printed 9.9 steps/s"),
    ],
)
def test_a_printed_rate_is_noted_where_it_differs_from_the_measured_one(
    printed: dict[float, str], unit: str, batch: float | None, said: str
) -> None:
    lines = tuple(
        PrintedLine(
            kind="rate", rank=0, wall_ns=0, text=text, step=None, per_second=rate, unit=unit
        )
        for rate, text in printed.items()
    )
    sizes = {"steps": (1.0,), "samples": (batch, 2 * batch) if batch else ()}
    output = Output(lines=lines, file_count=1, skipped_bytes=0)
    notes = list(printed_notes(output, 1e9 / 13.4, sizes, died=False))
    assert (said in notes[0]) if said else not notes
