"""Link and prefill attention of planned requests on CUDA."""
