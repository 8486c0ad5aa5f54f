# Nothing of this module is seen from Python; its C interface is in the .pxd.
