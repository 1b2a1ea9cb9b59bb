"""From a checkpoint to a report: convert, build, summarize (docs/from_tensorrt_llm.md)."""
