"""The readers of roff, reStructuredText and HTML, on the constructs of real pages."""

import shutil
import subprocess

import pytest
from corpora.html_text import html_text
from corpora.roff_text import roff_text, unescape
from corpora.rst_text import rst_text, unmarked

MAN_PAGE = r"""'\" t
.\" a comment
.TH qsort 3 2023-01-07 "Linux man-pages 6.03"
.SH NAME
qsort \- sort an array
.SH SYNOPSIS
.nf
.B #include <stdlib.h>
.PP
.BI "void qsort(void " base [. size " * ." nmemb "], size_t " nmemb ", \
size_t " size );
.fi
.SH "RETURN VALUE"
The
.BR qsort ()
functions, in \f(CWtype\fP \fIa\e0\fP\(em\(aqb\(aq and \[:u]ber\~all,
return	no value. \" to the end
.TP
.BI \-a " list" , " \-\-all"
Takes
.IR "a list" .
.TQ
.B \-b
Says ""so"".
.IP \(bu 3
One
.RS
.EX
  for (;;)
      x = "a";
.EE
.RE
.TS
allbox;
lbx lb
l l.
Interface	Value
T{
.BR qsort (),
.BR qsort_r ()
T}	MT-Safe
.TE
.ie t \{\
left out
.\}
.el left out too
.SS Notes
.UR http://x.org
the page
.UE
.SH SEE ALSO
.so man3/x.3
.BR sort (1)
"""
SECTIONS = {
    "NAME": "qsort - sort an array",
    "SYNOPSIS": "#include <stdlib.h>\n\nvoid qsort(void base[.size * .nmemb], size_t nmemb, size_t size);",
    "RETURN VALUE": "The qsort() functions, in type a\\0—'b' and über all, return no value.\n\n-a list, --all\n"
    'Takes a list.\n-b\nSays ""so"".\n\n• One\n\nfor (;;)\nx = "a";\n\nInterface Value\nqsort(), qsort_r() MT-Safe\n\n'
    "Notes\nhttp://x.org the page",
    "SEE ALSO": "sort(1)",
}


def test_roff() -> None:
    assert roff_text(MAN_PAGE) == SECTIONS


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_roff_has_the_words_that_groff_prints() -> None:
    source = "\n".join(line for line in MAN_PAGE.splitlines() if not line.startswith(".so"))
    words = ["groff", "-t", "-Tutf8", "-man", "-rHY=0", "-rLL=400n", "-P-cbou"]
    printed = subprocess.run(words, input=source, capture_output=True, check=True, text=True).stdout
    body = printed.split("SEE ALSO")[0].replace("‐", "-")
    drawn = str.maketrans(dict.fromkeys("─│┌┐└┘├┤┬┴┼⟨⟩", " "))
    ours = [word for name in list(SECTIONS)[:-1] for word in f"{name} {SECTIONS[name]}".split()]
    theirs = body.translate(drawn).split("\n", 2)[2].split()
    assert set(ours) - {"http://x.org"} <= set(theirs)


def test_roff_escapes() -> None:
    assert unescape(r"\*(lqa\*(rq \[u00E4] \s+2b\s0\h'1m'c \N'65' \\ \(xx\n[x]d\c") == "“a” ä bc A \\ d"


RST = """\
:mod:`statistics` --- Functions
===============================

.. module:: statistics
   :synopsis: hidden

.. versionadded:: 3.4

.. function:: mean(data)
   :noindex:

   Return the *mean* of **data**,
   see :class:`~numbers.Real` and `NumPy <http://x.org>`_::

       >>> mean([1])
       1

   * a bullet that
     goes on
   * another

.. code-block:: python

   hidden()

   hidden_too()

>>> hidden
1

+------+-----+
| hidden table |
+------+-----+

.. a comment
   of two lines
.. _target:

.. versionchanged:: 3.8
   Now faster.
"""


def test_rst() -> None:
    assert rst_text(RST).split("\n\n") == [
        "statistics --- Functions",
        "mean(data)",
        "Return the mean of data, see Real and NumPy:",
        "a bullet that goes on",
        "another",
        "Now faster.",
    ]


def test_rst_markup_that_is_none() -> None:
    assert unmarked("2 * 3 * 4 and **kwargs, a `term`, :pep:`8`") == "2 * 3 * 4 and **kwargs, a term, 8"


def test_html() -> None:
    assert html_text("<style>p {}</style><p>a&amp;b</p><!-- no --><table><tr><td>c</td></tr></table>d") == "a&b\nc\nd"
    assert html_text("<head><body>an unclosed head") == "an unclosed head"
