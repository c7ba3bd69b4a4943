"""`picbench measure`, a command for each measurement or group of them."""
