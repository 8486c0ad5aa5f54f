"""Messages of the Open Inference Protocol in the form of Protocol Buffers."""
