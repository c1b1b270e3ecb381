"""megatron_adaptra: pipeline schedules that adapt to slow links while Megatron-LM trains."""

__version__ = "0.1.0"
