// Calls of C kernels that were noted down, made again one after the other.
struct Call {
    void (*function)(const void *work);
    const void *work;
};

void stoker_replay(const struct Call *calls, long count) {
    for (const struct Call *call = calls; call < calls + count; call++) call->function(call->work);
}
