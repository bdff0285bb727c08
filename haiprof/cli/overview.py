"""`haiprof verdict overview`: the whole job, every rank, its counters and its time split."""

from __future__ import annotations

from haiprof.cli.arguments import AsJson, HtmlFile, RunDir
from haiprof.cli.output import Output
from haiprof.cli.target import open_target


def overview(directory: RunDir = None, as_json: AsJson = False, html: HtmlFile = None) -> None:
    """Show the whole job: per rank the steps and their time split, CPU, memory, traffic, GPU.

    Also works while the job runs. What was not measured is a dash, with the reason below.

    For example:

      haiprof verdict overview                            the newest run of the log directory
      haiprof verdict overview haiprof-logs/train-...     that run
      haiprof verdict overview --html overview.html       interactive, in one file
      haiprof verdict overview --json | jq '.ranks[].median_step_ns'
    """
    from haiprof.show.summary import overview_summary
    from haiprof.show.views.run import overview_view

    analyzer = open_target(directory)
    output = Output(json=as_json)
    summary = overview_summary(analyzer)
    if html is not None:
        from haiprof.show.page.render import write_overview_page

        output.hint(f"wrote {write_overview_page(analyzer, html)}")
    output.show(lambda width: overview_view(summary, width=width), summary.as_json())
    output.hint(f"next: haiprof verdict rank {summary.run.path} 0")
