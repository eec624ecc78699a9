// Threads that share the parts of one piece of work, for kernels on CPUs. Between pieces they look for the next one for a
// moment, letting whoever else wants the processor have it, and then sleep.
//
// Parts are taken one at a time, so that a thread which wakes up late, or shares its processor, does fewer of them, and
// nobody waits for work that was not begun.
// Invariants: work is published before `open`, and stays until nobody is `inside`; one caller at a time has the helpers,
// another one works alone. A child of fork() starts helpers of its own.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_HELPERS 63
// A step's pieces follow each other within some 50 us; to wake a sleeper takes as long.
#define LINGER_NS 150000

typedef void (*DoPart)(const void *work, long part);

static struct {
    pthread_mutex_t only;
    pid_t owner;
    int helpers;                 // that were started
    _Atomic uint32_t round;      // changes with each piece of work: what sleepers wait on
    _Atomic int sleepers, inside, open, wanted;
    _Atomic long next;
    long parts;
    DoPart function;
    const void *work;
} pool = {.only = PTHREAD_MUTEX_INITIALIZER};

static inline void pool_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void pool_take_parts(void) {
    DoPart function = pool.function;
    const void *work = pool.work;
    for (long part; (part = atomic_fetch_add(&pool.next, 1)) < pool.parts;) function(work, part);
}

static long pool_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000l + now.tv_nsec;
}

// Waits for the next round, or for as long as it is worth.
static void pool_linger(uint32_t seen) {
    const long until = pool_now() + LINGER_NS;
    while (atomic_load(&pool.round) == seen && pool_now() < until) sched_yield();
}

static void *pool_helper(void *number) {
    for (;;) {
        uint32_t seen = atomic_load(&pool.round);
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open) && (long)(intptr_t)number < atomic_load(&pool.wanted)) pool_take_parts();
        atomic_fetch_sub(&pool.inside, 1);
        pool_linger(seen);
        atomic_fetch_add(&pool.sleepers, 1);
        if (atomic_load(&pool.round) == seen) syscall(SYS_futex, &pool.round, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
        atomic_fetch_sub(&pool.sleepers, 1);
    }
    return 0;
}

static void pool_grow(int helpers) {
    if (pool.owner != getpid()) {  // a child has none of its parent's threads
        pool.owner = getpid();
        pool.helpers = 0;
        atomic_store(&pool.sleepers, 0);
        atomic_store(&pool.inside, 0);
    }
    for (; pool.helpers < helpers; pool.helpers++) {
        pthread_t made;
        if (pthread_create(&made, 0, pool_helper, (void *)(intptr_t)pool.helpers)) return;
        pthread_detach(made);
    }
}

// function(work, part) for every part, by up to `threads` threads, this one among them; returns when all are done.
static void pool_run(DoPart function, const void *work, long parts, int threads) {
    int helpers = threads - 1 < MOST_HELPERS ? threads - 1 : MOST_HELPERS;
    if (helpers < 1 || parts < 2 || pthread_mutex_trylock(&pool.only)) {
        for (long part = 0; part < parts; part++) function(work, part);
        return;
    }
    pool_grow(helpers);
    pool.function = function;
    pool.work = work;
    pool.parts = parts;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.wanted, helpers);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleepers)) {
        int most = parts - 1 < helpers ? (int)parts - 1 : helpers;
        // Helpers beyond those that are wanted may be the ones who wake up: then wake all.
        if (pool.helpers > helpers) most = pool.helpers;
        syscall(SYS_futex, &pool.round, FUTEX_WAKE_PRIVATE, most, 0, 0, 0);
    }
    pool_take_parts();
    atomic_store(&pool.open, 0);
    for (long turns = 0; atomic_load(&pool.inside); turns++) {
        if (turns < 4096) pool_pause();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.only);
}
