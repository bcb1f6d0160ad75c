import nearsight


def test_version():
    assert nearsight.__version__
