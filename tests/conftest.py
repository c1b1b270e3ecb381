"""Settings of every test; a failing hypothesis example prints the blob that reproduces it."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "adaptra",
    max_examples=60,
    deadline=None,  # the machine is shared, so seconds say nothing
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("adaptra")
