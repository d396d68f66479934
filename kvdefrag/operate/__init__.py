"""Looking at a live server and steering it, from outside its processes."""
