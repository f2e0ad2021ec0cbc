"""The continuous-batching engine: request, scheduler, runner, sampler."""
