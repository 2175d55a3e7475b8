// Functions of C for lockstep.rs, compiled with several options: tables, loops, tail calls, structures, all kinds of registers.
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pair { long first, second; };
struct big { long words[12]; };
typedef long (*callback)(long, void *);

static volatile long sink;

long leaf(long a, long b) { return a * 3 + b; }
void nothing(void) {}
long constant(void) { return 42; }
long red_zone(const long *p) {
    long a[8];
    for (int i = 0; i < 8; i++) a[i] = p[i & 3] + i;
    return a[sink & 7] + a[(sink + 3) & 7];
}
long table(unsigned long n, long x) {
    switch (n) {
    case 0: return x + 1;
    case 1: return x * 5;
    case 2: sink = x; return 2;
    case 3: return leaf(x, 3);
    case 4: return x >> 3;
    case 5: return -x;
    case 6: return x ^ 0x55;
    case 7: return leaf(3, x) + 1;
    default: return 0;
    }
}
long strings(unsigned long n, const char **out) {
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    switch (n & 7) {
    case 0: *out = names[0]; break;
    case 1: *out = names[1]; return 5;
    case 2: *out = names[2]; break;
    case 3: *out = names[3]; sink++; break;
    case 4: *out = names[4]; break;
    case 5: return table(n, 1);
    case 6: abort();
    default: *out = ""; break;
    }
    return strlen(*out);
}
long tail(long a, long b) { return a > b ? leaf(a, b) : table(a, b); }
long tail_pointer(callback f, void *data) { return f(7, data); }
long recursive(unsigned n) { return n % 16 < 2 ? 1 : recursive(n % 16 - 1) + recursive(n % 16 - 2); }
long loop_at_entry(long *p) { while (*p > 0) *p -= 1; return *p; }
long sum(const int *p, int n) {
    long total = 0;
    for (int i = 0; i < (n & 63); i++) total += p[i];
    return total;
}
double real(double x, double y) { return x > y ? x * y + 1 : y / (x + 2); }
float single(float x, int n) { for (int i = 0; i < (n & 7); i++) x = x * 0.5f + i; return x; }
long double extended(long double x, long n) { return n & 1 ? x * 2 + n : x - 1; }
long to_extended(long n) { return (long)extended(n, n); }
struct pair by_value(struct pair p, long n) { return (struct pair){p.second + n, p.first}; }
struct big large(struct big b, int i) { b.words[i % 12u] ^= b.words[3]; return b; }
__int128 wide(__int128 a, long b) { return a * b + 1; }
unsigned long divide(unsigned long a, unsigned long b) { return b ? a / b + a % b : a; }
int compare(const void *a, const void *b) {
    long x = *(const long *)a, y = *(const long *)b;
    return x < y ? -1 : x > y;
}
void sort(long *p) { qsort(p, 8, sizeof *p, compare); }
long variadic(int n, ...) {
    va_list list;
    va_start(list, n);
    long total = 0;
    for (int i = 0; i < (n & 7); i++) total += va_arg(list, long);
    va_end(list);
    return total;
}
long calls_variadic(long a) { return variadic(3, a, a + 1, a * 2); }
long jumps(jmp_buf *where, long n) {
    jmp_buf own;
    volatile long m = n;
    if (setjmp(own)) return m;
    if (n & 1) longjmp(own, 1);
    return n;
}
void copy(char *to, const char *from, unsigned n) { memcpy(to, from, n & 255); memset(to, 1, n & 31); }
long many(long a, long b, long c, long d, long e, long f, long g, long h) {
    return a - b + c * d - (e ^ f) + (g | h) + leaf(a, h);
}
long atomic(long *p, long n) { return __sync_fetch_and_add(p, n) + __sync_val_compare_and_swap(p, n, 1); }
long bits(uint64_t n) { return __builtin_popcountl(n) + __builtin_ctzl(n | 1) + (n << (n & 15)); }
__attribute__((noinline, cold)) static long unlikely(long n) { return sink + n * 9; }
long hot(long n) { return __builtin_expect(n > 1000, 0) ? unlikely(n) + n : n + 1; }
long early(const long *p) {
    if (!p) return 0;
    if (p[0] == 1) return 1;
    if (p[1] == 1) return 2;
    if (p[0] > p[1]) return hot(p[0]);
    return leaf(p[0], p[1]) + recursive(p[2]);
}
long nested(long n) {
    long total = 0;
    for (long i = 0; i < (n & 3); i++)
        for (long j = i; j < 4; j++) total += table(i + j, n) ^ bits(total);
    return total;
}
long text(char *out, const char *format) { return snprintf(out, 64, "%ld %s", sink, format ? "x" : "y"); }
long number(const char *text) { return strtol(text, NULL, 10) + atoi("17"); }

int main(void) {
    char line[64];
    puts("ready");
    fflush(stdout);
    return fgets(line, sizeof line, stdin) == NULL;
}
